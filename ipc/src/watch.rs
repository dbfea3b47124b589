//! Waiting at many bells at once, for those that cannot sleep: they wait for a descriptor.
//!
//! A thread sleeps at the bells, and tells whoever listens there that one was rung. It is at
//! each of them from when somebody begins to listen, whether that one waits or not, and does not
//! say that somebody sleeps: who waits says so ([`Doorbell::announce`], and again each second, by
//! its listener), looks once more, and that is all. So waiting costs no call of the system, and a ring costs none as long
//! as nobody waits.
//!
//! Nothing is lost. A ring moves the bell's count; the thread compares it with the one that it
//! saw last, and tells the listener after it has seen another one. Whoever stored something
//! before an announcement is found by the look after it. Whoever stored it later sees the
//! announcement, and its ring comes after that, so the listener is told after that, too.
//! (`models/watch.rs` tries all orders of it.)
//!
//! The kernel takes 128 words at a time: of more bells there are more threads, and one for each
//! bell where it takes one only (before Linux 5.16).

use std::fmt::Debug;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bell::{Doorbell, LONGEST_SLEEP};
use crate::futex;
use crate::life::Incarnation;
use crate::words::{KernelWords, LocalWords, Words};

/// One who is told when a bell was rung. It is told by the thread of a [`Watch`], which serves
/// others, too: so it does not wait for anything.
pub trait Listener: Debug + Send + Sync {
    /// The bell was rung.
    fn rung(&self);
    /// Some time has passed, a second or so. One who waits announces itself again, and looks:
    /// whoever was about to ring may have been stopped before.
    fn look(&self);
}

/// A bell, whatever words it is made of.
trait Rope: Debug + Send + Sync {
    fn count(&self) -> u64;
    fn word(&self) -> Option<&AtomicU64>;
    fn ring_anyway(&self);
}

impl<W: KernelWords + Debug + Send + Sync> Rope for Doorbell<W> {
    fn count(&self) -> u64 {
        self.count()
    }
    fn word(&self) -> Option<&AtomicU64> {
        self.word()
    }
    fn ring_anyway(&self) {
        self.ring_anyway();
    }
}

/// Threads at bells: none as long as nobody listens. A forked child has none of them, and makes
/// a watch of its own.
///
/// ```
/// use std::sync::{Arc, mpsc};
/// use std::time::Duration;
/// use ipc::{Doorbell, Layout, Listener, Segment, Watch};
///
/// #[derive(Debug)]
/// struct Teller(mpsc::Sender<()>);
/// impl Listener for Teller {
///     fn rung(&self) {
///         let _ = self.0.send(());
///     }
///     fn look(&self) {}
/// }
///
/// // Others that map the segment ring there, too.
/// let segment = Segment::create(Layout::new("a bell", 1), 64).unwrap();
/// let bell = Doorbell::new(segment.words()).unwrap();
/// let (sender, receiver) = mpsc::channel();
/// let watch = Watch::new();
/// let listening = watch.listen(bell.clone(), Arc::new(Teller(sender)))?;
/// bell.ring(); // nobody waits: next to nothing
/// assert!(receiver.try_recv().is_err());
///
/// bell.announce(); // and then one looks for what is waited for
/// bell.ring();
/// receiver.recv_timeout(Duration::from_secs(10)).unwrap();
/// drop(listening); // from here on nothing is told any more
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Watch {
    /// Bells of each thread.
    most: usize,
    groups: Mutex<Vec<Arc<Group>>>,
}

impl Default for Watch {
    fn default() -> Self {
        Self::new()
    }
}

/// The bells of one thread.
#[derive(Debug)]
struct Group {
    most: usize,
    state: Mutex<State>,
    /// Moves when the thread has to look at its bells anew.
    control: LocalWords,
}

#[derive(Debug, Default)]
struct State {
    posts: Vec<Post>,
    next: u64,
    /// The thread has ended, or is about to.
    is_over: bool,
}

/// A bell, and who listens.
#[derive(Debug)]
struct Post {
    number: u64,
    bell: Arc<dyn Rope>,
    /// Its count when it was looked at last.
    seen: u64,
    listener: Arc<dyn Listener>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    /// With as many bells for each thread as the kernel allows.
    #[must_use]
    pub fn new() -> Self {
        // One word is the thread's own.
        Self::with_bells(if futex::knows_several() { futex::MOST - 1 } else { 1 })
    }

    /// With no more bells for each thread than so many: with one, as where the kernel knows no
    /// better.
    #[must_use]
    pub fn with_bells(most: usize) -> Self {
        let possible = if futex::knows_several() { futex::MOST - 1 } else { 1 };
        Self { most: most.clamp(1, possible), groups: Mutex::default() }
    }

    /// Tells this listener of each ring from now on, until what this gives is dropped.
    ///
    /// # Errors
    /// What the system says: that there can be no more threads.
    pub fn listen<W>(&self, bell: Doorbell<W>, listener: Arc<dyn Listener>) -> io::Result<Listening>
    where
        W: KernelWords + Debug + Send + Sync + 'static,
    {
        let seen = bell.count();
        let mut post = Post { number: 0, bell: Arc::new(bell), seen, listener };
        let born = Incarnation::current();
        let mut groups = locked(&self.groups);
        groups.retain(|group| !locked(&group.state).is_over);
        for group in groups.iter() {
            post = match group.add(post) {
                Ok(number) => return Ok(Listening { group: Arc::clone(group), number, born }),
                Err(post) => post,
            };
        }
        let state = State { posts: vec![post], next: 1, is_over: false };
        let control = LocalWords::zeroed(1);
        let group = Arc::new(Group { most: self.most, state: Mutex::new(state), control });
        let thread = std::thread::Builder::new().name("fabricast-watch".into());
        thread.spawn({
            let group = Arc::clone(&group);
            move || group.run()
        })?;
        groups.push(Arc::clone(&group));
        Ok(Listening { group, number: 0, born })
    }

    /// How many threads there are.
    #[must_use]
    pub fn threads(&self) -> usize {
        let is_over = |group: &&Arc<Group>| locked(&group.state).is_over;
        let groups = locked(&self.groups);
        groups.len() - groups.iter().filter(is_over).count()
    }
}

impl Group {
    fn add(&self, mut post: Post) -> Result<u64, Post> {
        let mut state = locked(&self.state);
        if state.is_over || state.posts.len() >= self.most {
            return Err(post);
        }
        let number = state.next;
        post.number = number;
        state.next += 1;
        state.posts.push(post);
        drop(state);
        self.call();
        Ok(number)
    }

    /// Once this is done, nothing is told to its listener, and nobody here has it any more.
    fn remove(&self, number: u64) {
        let mut state = locked(&self.state);
        let Some(at) = state.posts.iter().position(|post| post.number == number) else { return };
        let post = state.posts.swap_remove(at);
        state.is_over = state.posts.is_empty();
        drop(state);
        if self.most == 1 {
            // The bell is all that its thread sleeps at. Others wake for nothing.
            post.bell.ring_anyway();
        } else {
            self.call();
        }
    }

    /// Has the thread look anew.
    fn call(&self) {
        self.control.fetch_add(0, 1);
        self.control.wake(0, 1);
    }

    fn run(&self) {
        let mut looked = Instant::now();
        let mut beds = Vec::new();
        loop {
            let called = {
                let mut state = locked(&self.state);
                if state.is_over {
                    return;
                }
                let is_time = looked.elapsed() >= LONGEST_SLEEP;
                if is_time {
                    looked = Instant::now();
                }
                for post in &mut state.posts {
                    let count = post.bell.count();
                    if count != post.seen {
                        post.seen = count;
                        post.listener.rung();
                    } else if is_time {
                        post.listener.look();
                    }
                    beds.push((Arc::clone(&post.bell), count as u32));
                }
                // Those who change something do so before they call.
                self.control.load(0, Acquire) as u32
            };
            self.sleep(called, &beds);
            // Before it looks again: words that nobody listens at any more are not kept mapped.
            beds.clear();
        }
    }

    fn sleep(&self, called: u32, beds: &[(Arc<dyn Rope>, u32)]) {
        let mut words = beds.iter().filter_map(|(bell, count)| Some((bell.word()?, *count)));
        if self.most == 1 {
            if let Some((word, count)) = words.next() {
                futex::sleep(word, count, LONGEST_SLEEP);
            }
            return;
        }
        let called = self.control.word(0).map(|word| (word, called));
        if futex::sleep_on_any(called.into_iter().chain(words), LONGEST_SLEEP).is_err() {
            // The kernel has no memory for it: rings are heard a little later meanwhile.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// One who listens at a bell. Once it is dropped, nothing is told any more; the thread ends with
/// the last one.
#[derive(Debug)]
#[must_use = "dropped, it does not listen any more"]
pub struct Listening {
    group: Arc<Group>,
    number: u64,
    born: Incarnation,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // A forked child has neither the thread nor anybody who would let go of the lock.
        if self.born.is_current() {
            self.group.remove(self.number);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
