//! The fabric of an agent, chosen by a policy.

use fabric::{Offer, local_address};

use crate::failure::{Failure, Operation, Result};

/// The best offer by this policy, from this local address.
pub(super) fn choose(operation: Operation, policy: &str, source: Option<&str>) -> Result<Offer> {
    let source = source.map(local_address).transpose().map_err(|error| {
        let cause = error.detail().unwrap_or_default();
        Failure::invalid(operation, format!("\"source\": {cause}"))
    })?;
    Ok(transfer::choose_fabric(policy, source)?)
}

#[cfg(test)]
mod tests {
    use fabric::Caps;

    use super::*;
    use crate::status::Status;

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
