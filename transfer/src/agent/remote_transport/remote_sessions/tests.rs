//! Sessions by several rails, and their events.

use proptest::prelude::*;

use super::*;

const A: Identity = [1; 16];

fn label() -> String {
    "a".to_owned()
}

/// The events as letters: joined, left (dead or not), lost and restored with the rail.
fn events(remote_sessions: &mut RemoteSessions) -> String {
    let letters = remote_sessions.events.drain(..).map(|event| match event {
        Event::Joined { .. } => "J".to_owned(),
        Event::Left { is_dead: true, .. } => "D".to_owned(),
        Event::Left { .. } => "L".to_owned(),
        Event::RailLost { rail, .. } => format!("-{rail}"),
        Event::RailRestored { rail, .. } => format!("+{rail}"),
        Event::Notice { .. } => "N".to_owned(),
    });
    letters.collect()
}

struct World(RemoteSessions);

impl World {
    fn session_opened(&mut self, rail: usize, session: u64, connection_id: u64) -> String {
        self.0.session_opened(rail, session, (A, connection_id), label());
        events(&mut self.0)
    }

    fn session_closed(&mut self, rail: usize, session: u64, lost: bool) -> String {
        self.0.session_closed(rail, session, lost.then(|| "it is silent".to_owned()));
        events(&mut self.0)
    }

    fn lost(&mut self, rail: usize, link: u32) -> String {
        let reason = "silent".to_owned();
        self.0.half_lost(rail, LostHalf::Link(link), (A, label()), Departure::Dead, reason);
        events(&mut self.0)
    }

    fn restored(&mut self, rail: usize, link: u32) -> String {
        self.0.half_restored(A, rail, LostHalf::Link(link), label());
        events(&mut self.0)
    }
}

fn world() -> World {
    World(RemoteSessions::default())
}

#[test]
fn initiator_with_several_rails_joins_and_leaves_once() {
    let mut world = world();
    assert_eq!(world.session_opened(0, 10, 7), "J");
    assert_eq!(world.session_opened(1, 11, 7), "");
    assert_eq!(world.session_opened(2, 12, 7), "");
    assert_eq!(world.session_closed(1, 11, false), "");
    assert_eq!(world.session_closed(0, 10, false), "");
    assert_eq!(world.session_closed(2, 12, false), "L");
    assert_eq!(world.session_closed(2, 12, false), "");
    assert_eq!(world.session_opened(0, 13, 7), "J");
}

#[test]
fn lost_rail_is_restored_without_its_peer_leaving() {
    let mut world = world();
    world.session_opened(0, 10, 7);
    world.session_opened(1, 11, 7);
    assert_eq!(world.session_closed(0, 10, true), "-0");
    assert_eq!(world.session_opened(0, 12, 7), "+0");
    assert_eq!(world.session_closed(0, 12, true), "-0");
    assert_eq!(world.session_closed(1, 11, true), "-1D");
    // After leaving, it joins again.
    assert_eq!(world.session_opened(1, 13, 7), "J");
    assert_eq!(world.session_opened(0, 14, 7), "");
}

#[test]
fn initiator_that_reconnects_before_its_loss_did_not_leave() {
    let mut world = world();
    assert_eq!(world.session_opened(0, 10, 7), "J");
    assert_eq!(world.session_opened(0, 11, 7), "");
    assert_eq!(world.session_closed(0, 10, true), "");
    assert_eq!(world.session_closed(0, 11, true), "-0D");
}

#[test]
fn two_connections_share_the_events_of_a_rail() {
    let mut world = world();
    assert_eq!(world.session_opened(0, 10, 7), "J");
    assert_eq!(world.session_opened(0, 20, 8), "J");
    assert_eq!(world.lost(0, 3), "-0");
    assert_eq!(world.session_closed(0, 10, true), "D");
    assert_eq!(world.session_closed(0, 20, true), "D");
    assert_eq!(world.session_opened(0, 11, 7), "J");
    assert_eq!(world.restored(0, 3), "+0");
    assert_eq!(world.restored(0, 3), "");
}

#[test]
fn closed_link_is_not_lost() {
    let mut world = world();
    assert_eq!(world.lost(0, 3), "-0");
    assert_eq!(world.lost(0, 3), "");
    assert_eq!(world.lost(0, 4), "");
    world.0.link_closed(3);
    assert_eq!(world.restored(0, 4), "+0");
    assert_eq!(world.lost(1, 4), "-1");
    world.0.link_closed(4);
    assert_eq!(world.lost(1, 5), "-1");
    assert!(world.0.initiators.is_empty());
}

proptest! {
    /// Whatever the rails do in any order: joined and left alternate, lost and restored alternate
    /// per rail, and no state remains at the end.
    #[test]
    fn events_alternate(
        steps in proptest::collection::vec((0_usize..3, any::<bool>(), any::<bool>()), 0..100),
    ) {
        let mut world = world();
        let (mut sessions, mut links) = ([None::<u64>; 3], [true; 3]);
        let (mut is_joined, mut is_lost) = (false, [false; 3]);
        let mut next = 0;
        let mut check = |events: String| {
            let mut letters = events.chars();
            while let Some(letter) = letters.next() {
                let mut rail = || letters.next().unwrap().to_digit(10).unwrap() as usize;
                match letter {
                    'J' => assert!(!std::mem::replace(&mut is_joined, true)),
                    'L' | 'D' => assert!(std::mem::replace(&mut is_joined, false)),
                    '-' => is_lost[rail()] = true,
                    '+' => assert!(std::mem::replace(&mut is_lost[rail()], false)),
                    _ => unreachable!(),
                }
            }
        };
        for (rail, is_link, is_lost) in steps {
            check(match (is_link, sessions[rail]) {
                (true, _) if links[rail] => {
                    links[rail] = false;
                    world.lost(rail, rail as u32)
                }
                (true, _) => {
                    links[rail] = true;
                    world.restored(rail, rail as u32)
                }
                (false, Some(session)) => {
                    sessions[rail] = None;
                    world.session_closed(rail, session, is_lost)
                }
                (false, None) => {
                    next += 1;
                    sessions[rail] = Some(next);
                    world.session_opened(rail, next, 7)
                }
            });
        }
        for (rail, session) in sessions.into_iter().enumerate() {
            check(world.restored(rail, rail as u32));
            if let Some(session) = session {
                check(world.session_closed(rail, session, false));
            }
        }
        prop_assert!(!is_joined);
        prop_assert!(world.0.initiators.is_empty() && world.0.by_session.is_empty());
        prop_assert!(world.0.lost_halves.is_empty(), "{:?}", world.0.lost_halves);
    }
}
