//! Notices of a link: sent as far as the target grants credit, and kept until acknowledged.

use std::collections::VecDeque;

use crate::notice::Notice;
use crate::operations::Token;

#[derive(Debug, Default)]
pub(super) struct NoticeQueue {
    unsent: VecDeque<(Token, Notice)>,
    unacknowledged: VecDeque<Token>,
    sent: u64,
    credit_limit: u64,
}

impl NoticeQueue {
    pub(super) fn push(&mut self, token: Token, notice: Notice) {
        self.unsent.push_back((token, notice));
    }

    /// The next notice to be sent, if there is credit.
    pub(super) fn next(&mut self) -> Option<Notice> {
        if self.sent >= self.credit_limit {
            return None;
        }
        let (token, notice) = self.unsent.pop_front()?;
        self.sent += 1;
        self.unacknowledged.push_back(token);
        Some(notice)
    }

    pub(super) fn add_credit(&mut self, credit_limit: u64) {
        self.credit_limit = self.credit_limit.max(credit_limit);
    }

    /// The peer has received so many notices since the session began: returns those that are new.
    /// None if more than were sent.
    pub(super) fn acknowledge(
        &mut self,
        notices: u64,
    ) -> Option<impl Iterator<Item = Token> + use<'_>> {
        let before = self.sent - self.unacknowledged.len() as u64;
        let more = notices.saturating_sub(before) as usize;
        (notices <= self.sent).then(|| self.unacknowledged.drain(..more))
    }

    /// The sent notices without acknowledgement, and the unsent ones.
    pub(super) fn into_rest(self) -> (VecDeque<Token>, VecDeque<(Token, Notice)>) {
        (self.unacknowledged, self.unsent)
    }
}
