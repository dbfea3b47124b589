//! The fabric of an agent, chosen by a policy.

use fabric::{
    Caps, EndpointKind, ErrorKind, Locality, MemoryKind, Offer, Policy, Query, Requirements,
    Verdict, local_address, select,
};

use crate::failure::{Failure, Operation, Result};
use crate::status::Status;

/// The policy that accepts every provider.
const AUTO: &str = "auto";

/// The best offer by this policy, from this local address. Offers that reach other machines are
/// preferred.
pub(super) fn choose(operation: Operation, policy: &str, source: Option<&str>) -> Result<Offer> {
    let policy: Policy = if policy.trim() == AUTO { Policy::default() } else { policy.parse()? };
    let source = match source.map(local_address).transpose() {
        Ok(source) => source,
        Err(error) => {
            let cause = error.detail().unwrap_or_default();
            return Err(Failure::invalid(operation, format!("\"source\": {cause}")));
        }
    };
    let caps = Caps::MESSAGE | Caps::RMA;
    let query = Query::new(EndpointKind::Rdm).caps(caps);
    let query = match source {
        Some(source) => query.interface(source),
        None => query,
    };
    let mut offers = match query.offers() {
        Ok(offers) => offers,
        Err(error) if error.kind() == ErrorKind::NoProvider => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let mut reasons = Vec::new();
    for locality in [Locality::OtherMachines, Locality::SameMachine] {
        let need = Requirements {
            endpoint: EndpointKind::Rdm,
            caps,
            memory: MemoryKind::Host,
            locality,
            immediate_bytes: 0,
            ordered: false,
        };
        let (choice, order) = select(&offers.iter().collect::<Vec<_>>(), &need, &policy);
        let taken = choice.candidates.iter().position(|one| one.verdict == Verdict::Taken);
        if let Some(at) = taken {
            return Ok(query.with_device_memory(offers.swap_remove(order[at])));
        }
        let candidates = choice.candidates.iter();
        reasons =
            candidates.map(|one| format!("{}: {}", one.provider, one.reasons.join(", "))).collect();
    }
    reasons.sort_unstable();
    reasons.dedup();
    let why = match reasons.is_empty() {
        true => "no provider was found".to_owned(),
        false => reasons.join("; "),
    };
    let from = source.map_or_else(String::new, |source| format!(" from {source}"));
    let detail = format!("no provider moves bytes between agents{from}: {why}");
    Err(Failure::new(Status::NoProvider, operation, detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn provider_is_chosen_by_the_policy_and_the_address() {
        let chosen = choose(c"test", "auto", Some("127.0.0.1")).unwrap();
        let provider = chosen.capabilities().provider.clone();
        assert!(chosen.capabilities().caps.contains(Caps::MESSAGE | Caps::RMA));
        let required = choose(c"test", &format!("={provider}"), Some("127.0.0.1")).unwrap();
        assert_eq!(required.capabilities().provider, provider);
        let denied = choose(c"test", &format!("^{provider}"), Some("127.0.0.1"));
        assert!(
            denied.is_err_and(|error| error.status == Status::NoProvider)
                || choose(c"test", &format!("^{provider}"), Some("127.0.0.1"))
                    .is_ok_and(|other| other.capabilities().provider != provider)
        );
    }

    #[test]
    fn impossible_choices_are_errors_with_the_reasons() {
        let failure = choose(c"test", "=sokets", Some("127.0.0.1")).unwrap_err();
        assert_eq!(failure.status, Status::NoProvider);
        assert!(failure.message().contains("policy requires sokets"), "{failure:?}");
        for (policy, source) in [("=tcp,^tcp", None), ("^", None), ("auto", Some("nowhere"))] {
            let failure = choose(c"test", policy, source).unwrap_err();
            assert_eq!(failure.status, Status::InvalidArgument, "{failure:?}");
        }
    }
}
