//! Which rings something happened for: a list, for who has many rings and looks after few.

use std::collections::VecDeque;

use super::super::receiver::RingReceiver;
use super::super::sender::RingSender;
use super::{Port, ReceiverId, SenderId};

/// A ring for which something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum News {
    /// Something may be there to be read, or it is broken.
    Read(ReceiverId),
    /// Something left, was read, or failed.
    Write(SenderId),
}

impl Port {
    /// From now on [`next_news`](Self::next_news) tells which rings something happened for: for
    /// who has many of them, and wants to look after none that nothing happened for.
    pub fn keep_news(&mut self) {
        self.news.get_or_insert_default();
    }

    /// A ring that something happened for since it was last given here.
    #[inline]
    pub fn next_news(&mut self) -> Option<News> {
        let news = self.news.as_mut()?.pop_front()?;
        match news {
            News::Read(id) => {
                let place = self.receivers.get_mut(usize::from(id.ring));
                if let Some(Some(receiver)) = place
                    && receiver.born() == id.born
                {
                    receiver.is_listed = false;
                }
            }
            News::Write(id) => {
                if let Some(Some(sender)) = self.senders.get_mut(usize::from(id.0)) {
                    sender.is_listed = false;
                }
            }
        }
        Some(news)
    }
}

/// Takes note that something happened for a ring.
#[inline]
pub(super) fn list_sender(news: &mut Option<VecDeque<News>>, name: u16, sender: &mut RingSender) {
    if let Some(news) = news
        && !sender.is_listed
    {
        sender.is_listed = true;
        news.push_back(News::Write(SenderId(name)));
    }
}

#[inline]
pub(super) fn list_receiver(
    news: &mut Option<VecDeque<News>>,
    ring: u16,
    receiver: &mut RingReceiver,
) {
    if let Some(news) = news
        && !receiver.is_listed
    {
        receiver.is_listed = true;
        news.push_back(News::Read(ReceiverId { ring, born: receiver.born() }));
    }
}
