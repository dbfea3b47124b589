//! Prints a choice of a provider with its candidates.

use fabric::{Candidate, Choice, Policy, Verdict};

use super::text::{print_error, wrapped};

const HEAD: [&str; 4] = ["verdict", "provider", "domain", "score"];

/// Every candidate with its verdict, score and reasons, below a head. Candidates that differ only
/// in their domain or network share a line; the first of them is used.
pub(crate) fn print(choice: &Choice) -> String {
    let mut groups: Vec<(&Candidate, Vec<&str>)> = Vec::new();
    for candidate in &choice.candidates {
        let same = groups.iter_mut().find(|(first, _)| {
            first.provider == candidate.provider
                && (first.verdict == Verdict::Refused) == (candidate.verdict == Verdict::Refused)
                && first.reasons == candidate.reasons
        });
        match same {
            Some((_, domains)) => domains.push(&candidate.domain),
            None => groups.push((candidate, vec![&candidate.domain])),
        }
    }
    let row_of = |(candidate, domains): &(&Candidate, Vec<&str>)| {
        let (verdict, score) = match candidate.verdict {
            Verdict::Taken => ("taken", candidate.score.to_string()),
            Verdict::Usable => ("usable", candidate.score.to_string()),
            Verdict::Refused => ("refused", String::new()),
        };
        [verdict.to_owned(), candidate.provider.clone(), join_domains(domains), score]
    };
    let rows: Vec<_> =
        [HEAD.map(str::to_owned)].into_iter().chain(groups.iter().map(row_of)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (provider, domain, score) = (width(1), width(2), width(3));
    let first = |[verdict, name, domains, points]: &[String; 4]| {
        format!("  {verdict:7}  {name:provider$}  {domains:domain$}  {points:>score$}  ")
    };
    let mut text = String::new();
    if !groups.is_empty() {
        text.push_str(&format!("{}reasons (points)\n", first(&rows[0])));
    }
    for (row, (candidate, _)) in rows[1..].iter().zip(&groups) {
        text.push_str(&wrapped(&first(row), &candidate.reasons.join("; ")));
    }
    if choice.candidates.is_empty() {
        text.push_str("  no candidates\n");
    }
    text
}

/// Warns of names in a policy that no provider here has.
pub(crate) fn warn_unknown_providers<'a>(
    policy: &Policy,
    providers: impl IntoIterator<Item = &'a str>,
) {
    let known = distinct(providers);
    for name in policy.unknown_providers(known.iter().copied()) {
        let available = known.join(", ");
        let name = name.escape_debug();
        print_error(&format!(
            "fabricast: warning: policy names unknown provider \"{name}\". Available: {available}"
        ));
    }
}

pub(crate) fn distinct<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut all = Vec::new();
    for name in names {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    all
}

/// `lo, eth0`; domains that do not fit are counted.
pub(crate) fn join_domains(domains: &[&str]) -> String {
    const LONGEST: usize = 16;
    let names = distinct(domains.iter().copied());
    let mut text = names.first().copied().unwrap_or_default().to_owned();
    for (shown, name) in names.iter().enumerate().skip(1) {
        if text.len() + 2 + name.len() > LONGEST {
            text.push_str(&format!(" +{}", names.len() - shown));
            break;
        }
        text.push_str(", ");
        text.push_str(name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(provider: &str, domain: &str, verdict: Verdict) -> Candidate {
        Candidate {
            provider: provider.to_owned(),
            fabric: String::new(),
            domain: domain.to_owned(),
            verdict,
            score: 12,
            reasons: vec!["native (+20)".to_owned(), "slow (-8)".to_owned()],
        }
    }

    #[test]
    fn candidates_that_differ_in_domain_share_a_line() {
        let choice = Choice {
            candidates: vec![
                candidate("shm", "shm", Verdict::Taken),
                candidate("net", "lo", Verdict::Usable),
                candidate("net", "eth0", Verdict::Usable),
                candidate("net", "lo", Verdict::Usable),
            ],
        };
        assert_eq!(
            print(&choice),
            "  verdict  provider  domain    score  reasons (points)\n  \
               taken    shm       shm          12  native (+20); slow (-8)\n  \
               usable   net       lo, eth0     12  native (+20); slow (-8)\n"
        );
        assert!(print(&Choice { candidates: vec![] }).contains("no candidate"));
    }

    #[test]
    fn domains_that_do_not_fit_are_counted() {
        assert_eq!(join_domains(&["lo"]), "lo");
        assert_eq!(join_domains(&["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]), "mlx5_0, mlx5_1 +2");
        assert_eq!(join_domains(&[]), "");
    }
}
