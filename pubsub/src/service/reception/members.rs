//! Those that die, leave, or lose their connection.

use std::sync::atomic::Ordering;
use std::time::Instant;

use ipc::{Fate, Participant};

use super::{ROLL_CALL, Reception, SERVING};
use crate::lock::lock;
use crate::service::election::Claim;
use crate::service::protocol::Notice;

impl Reception {
    /// A process has ended.
    pub(super) fn has_died(&mut self, who: Participant) {
        // Its end stays readable: who is known to be dead is not listened for any more.
        self.lives.remove(&who);
        self.loses(who);
        self.log_end_of_disconnected(who);
        self.unburied.insert(who);
        if let Some(gathering) = &mut self.gathering {
            gathering.is_back(who);
        }
    }

    /// A connection has ended. Whether the process has is another matter: one that lives comes
    /// back, with what it has.
    pub(super) fn loses(&mut self, who: Participant) {
        let Some(guest) = self.guests.remove(&who) else { return };
        self.is_not_awaited(who);
        let Some(seat) = &self.seat else { return };
        let (process, label) = (guest.process, guest.label);
        if guest.leaves {
            return;
        }
        if seat.roster.is_dead(Some(who)) {
            // That it leaves may be among what it said last and is not read any more.
            log_change!(self, %who, process, label, "a process has ended");
            return;
        }
        if seat.hall.attends(who) {
            tracing::debug!(%who, process, label, "lost the connection to a member");
            self.disconnected.insert(who, (process, label));
        } else {
            // It gave up before it became one, and has nothing.
            self.lives.remove(&who);
            self.unburied.insert(who);
        }
    }

    /// Logs the end of a process whose connection ended before its death was known.
    fn log_end_of_disconnected(&mut self, who: Participant) {
        if let Some((process, label)) = self.disconnected.remove(&who) {
            log_change!(self, %who, process, label, "a process has ended");
        }
    }

    /// A process leaves in order.
    pub(super) fn leaves(&mut self, who: Participant) {
        let Some(guest) = self.guests.get_mut(&who) else { return };
        guest.leaves = true;
        log_change!(self, %who, process = guest.process, label = guest.label, "a process leaves");
        self.is_not_awaited(who);
        self.lives.remove(&who);
        self.unburied.insert(who);
        if let Some(gathering) = &mut self.gathering {
            gathering.is_back(who);
        } else {
            self.bury_all();
        }
    }

    /// A process wants the office. It gets it if it is there to serve, and this one is not: only
    /// who has the claim can be that. Members hand over to it what they have, as if this service
    /// had ended by itself, and leave the office to it meanwhile. One that had the claim and did not
    /// serve has to wait for a while, lest the node be handed to and fro and nothing else.
    pub(super) fn gives_way(&mut self, who: Participant) {
        if self.options.stands.load(Ordering::Acquire) {
            tracing::debug!(%who, "a process that wants to serve has to wait until this one ends");
            return;
        }
        if self.options.stays_until.is_some_and(|until| Instant::now() < until) {
            tracing::debug!(%who, "who is to serve had its time, and has to wait");
            return;
        }
        let asks = self.guests.get(&who).map_or(0, |guest| guest.process);
        match Claim::holder(SERVING, &self.options.directory) {
            // Where both can be seen from here.
            Ok(Some(process)) if process != asks && process != 0 && asks != 0 => {
                tracing::debug!(%who, asks, process, "another process is to serve");
            }
            Ok(Some(process)) => {
                tracing::info!(process, "the node is handed over to a process that is to serve it");
                self.is_over.store(true, Ordering::Release);
            }
            // It is dead by now, or lies.
            Ok(None) => tracing::debug!(%who, "nobody is there who is to serve"),
            Err(error) => tracing::warn!(%error, "cannot see who is to serve the node"),
        }
    }

    /// Looks who is dead of whom nobody told: those that left when no service was there.
    pub(super) fn call_the_roll(&mut self) {
        let Some(seat) = &self.seat else { return };
        if self.roll_call.elapsed() < ROLL_CALL {
            return;
        }
        self.roll_call = Instant::now();
        let dead = seat.roster.the_dead();
        for who in dead {
            self.lives.remove(&who);
            self.unburied.insert(who);
            self.log_end_of_disconnected(who);
        }
    }

    /// Strikes off those of whom nobody knows whether they live, since who let them in was
    /// killed before it told of them, and who have nothing, since they never became members.
    pub(super) fn strike_off_strays(&self) {
        let Some(seat) = &self.seat else { return };
        for who in seat.roster.the_living() {
            let is_known = self.lives.contains_key(&who) || self.guests.contains_key(&who);
            if !is_known && !who.is_role() && !seat.hall.attends(who) {
                tracing::debug!(%who, "a name that nobody has is given back");
                seat.roster.strike_off(who);
            }
        }
    }

    /// Looks in what came late for those that are dead.
    pub(super) fn look_for_the_dead(&mut self) {
        let Some(seat) = self.seat.as_ref().filter(|_| self.has_news) else { return };
        match self.registry.names(&seat.caller()) {
            Ok(names) => {
                let dead = |who: &Participant| !who.is_role() && seat.roster.is_dead(Some(*who));
                self.unburied.extend(names.into_iter().filter(dead));
                self.has_news = false;
            }
            Err(error) => tracing::debug!(%error, "cannot look for those that are dead yet"),
        }
    }

    /// Sees to what those left that are dead or gone. What cannot be done now, since a living
    /// process holds a lock, is done at the next look.
    pub(super) fn bury_all(&mut self) {
        if self.gathering.is_some() {
            return;
        }
        for who in std::mem::take(&mut self.unburied) {
            if !self.bury(who) {
                self.unburied.insert(who);
            }
        }
    }

    fn bury(&mut self, who: Participant) -> bool {
        let Some(seat) = &self.seat else { return true };
        let settling = self.carrying.settling();
        let settled = lock(&settling);
        let buried = self.registry.bury(&seat.caller(), who);
        drop(settled);
        if let Err(error) = buried {
            tracing::debug!(%error, %who, "cannot clean up after a process yet");
            return false;
        }
        // Nothing names it any more.
        seat.roster.strike_off(who);
        for number in self.registry.uses_none(who, |_| true) {
            self.has_changed(number);
            self.forget_unused(number);
        }
        if let Some(mut guest) = self.guests.remove(&who) {
            guest.connection.send(&Notice::Left, Vec::new());
        }
        true
    }
}
