//! Choosing among offers: by facts, with a policy and a reason for every candidate.
//!
//! Everything that a choice depends on is in [`Capabilities`], [`Requirements`] and
//! [`Policy`], and in the table of provider quirks: [`rank`] is a pure function of them.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::flags::names;
use crate::query::merge;
use crate::quirks::{
    ORPHANED_LOCK_REASON, PENALTIES, matches_provider, orphans_locks, separate_fabric,
};
use crate::{
    Capabilities, Caps, Domain, EndpointKind, Error, ErrorKind, MemoryKind, Offer, Query, Result,
    Version,
};

/// Where the peers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Locality {
    /// All on this machine.
    SameMachine,
    /// Some on other machines.
    OtherMachines,
}

/// Requirements for an offer.
#[derive(Debug, Clone)]
pub struct Requirements {
    /// Kind of endpoint.
    pub endpoint: EndpointKind,
    /// Required capabilities.
    pub caps: Caps,
    /// The kind of memory that holds the payload.
    pub memory: MemoryKind,
    /// Where the peers are.
    pub locality: Locality,
    /// Bytes of immediate that one-sided writes must carry (`ImmediateWidths::write_data_size`);
    /// 0: no immediate is needed.
    pub immediate_bytes: usize,
    /// Must writes to one peer arrive in order (`FI_ORDER_WAW` and `FI_ORDER_SAW`)? Without
    /// this order, count completions, and never poll the last byte.
    pub ordered: bool,
}

impl Requirements {
    /// Writes with a 32-bit immediate from host memory to peers at this locality: the
    /// requirements of a ring.
    #[must_use]
    pub fn ring(locality: Locality) -> Self {
        Self {
            endpoint: EndpointKind::Rdm,
            caps: Caps::MESSAGE | Caps::RMA,
            memory: MemoryKind::Host,
            locality,
            immediate_bytes: 4,
            ordered: false,
        }
    }

    /// Requires support for payload in this kind of memory.
    #[must_use]
    pub fn memory(mut self, memory: MemoryKind) -> Self {
        self.memory = memory;
        self
    }
}

/// The user's preferences, which override the facts. Names match a whole provider name
/// (`tcp;ofi_rxm`) or one of its layers (`ofi_rxm`).
///
/// shm before libfabric 1.19 is refused unless the policy requires it: a killed peer can leave
/// the other process hanging inside libfabric.
///
/// ```
/// use fabric::Policy;
/// let policy: Policy = "verbs,tcp,^sockets".parse()?;
/// assert_eq!(policy.prefer, ["verbs", "tcp"]);
/// assert_eq!(policy.deny, ["sockets"]);
/// let must: Policy = "=shm".parse()?;
/// assert_eq!(must.require, ["shm"]);
/// assert_eq!(policy.to_string().parse::<Policy>()?, policy);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Policy {
    /// Preferred providers, in this order, if available.
    pub prefer: Vec<String>,
    /// Required: one of these, or no provider.
    pub require: Vec<String>,
    /// Denied providers.
    pub deny: Vec<String>,
}

const PARSE: &str = "parse provider policy";

impl Policy {
    /// Refuses policies that no provider can satisfy.
    ///
    /// # Errors
    /// `InvalidArgument` if a required provider is also denied.
    pub fn check(&self) -> Result<()> {
        self.require.iter().find(|name| self.deny.contains(name)).map_or(Ok(()), |name| {
            let detail = format!("\"{name}\" is both required and denied");
            Err(Error::new(ErrorKind::InvalidArgument, PARSE, detail))
        })
    }

    /// Names that match none of these providers or their layers: misspelt, or not installed.
    ///
    /// ```
    /// use fabric::Policy;
    /// let policy: Policy = "=ofi_rxm,verbs,^sokets".parse()?;
    /// assert_eq!(policy.unknown_providers(["tcp;ofi_rxm", "shm", "sockets"]), ["verbs", "sokets"]);
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn unknown_providers<'a>(&self, providers: impl IntoIterator<Item = &'a str>) -> Vec<&str> {
        let providers: Vec<_> = providers.into_iter().collect();
        let names = self.require.iter().chain(&self.prefer).chain(&self.deny);
        let is_of = |name: &str, provider: &str| {
            matches_provider(name, provider) || separate_fabric(provider, name).is_some()
        };
        names
            .map(String::as_str)
            .filter(|name| !providers.iter().any(|provider| is_of(name, provider)))
            .collect()
    }
}

impl fmt::Display for Policy {
    /// Writes the policy in the form that is parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lists = [("", &self.prefer), ("=", &self.require), ("^", &self.deny)];
        let items =
            lists.into_iter().flat_map(|(sign, names)| names.iter().map(move |it| (sign, it)));
        for (at, (sign, name)) in items.enumerate() {
            write!(f, "{}{sign}{name}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for Policy {
    type Err = Error;

    /// A comma-separated list: `name` prefers, `=name` requires, `^name` denies.
    fn from_str(text: &str) -> Result<Self> {
        let mut policy = Self::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (list, name) = match item.as_bytes()[0] {
                b'^' => (&mut policy.deny, item[1..].trim()),
                b'=' => (&mut policy.require, item[1..].trim()),
                _ => (&mut policy.prefer, item),
            };
            if name.is_empty() || name.contains(['^', '=']) {
                let detail = format!(
                    "\"{item}\" is not a provider name with an optional ^ (deny) or = (require)"
                );
                return Err(Error::new(ErrorKind::InvalidArgument, PARSE, detail));
            }
            list.push(name.to_owned());
        }
        policy.check()?;
        Ok(policy)
    }
}

/// The verdict on a candidate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// This candidate was selected.
    Taken,
    /// The candidate is usable, but another is better.
    Usable,
    /// The candidate cannot or must not be used.
    Refused,
}

/// One offer with its verdict.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// Provider.
    pub provider: String,
    /// Fabric.
    pub fabric: String,
    /// Domain.
    pub domain: String,
    /// The verdict.
    pub verdict: Verdict,
    /// The score; higher is better. 0 for refused candidates.
    pub score: i64,
    /// The reason: the advantages, or the first requirement that the candidate fails.
    pub reasons: Vec<String>,
}

/// The record of a choice.
#[derive(Debug, Clone, Serialize)]
pub struct Choice {
    /// All candidates, best first.
    pub candidates: Vec<Candidate>,
}

impl Choice {
    /// The selected candidate.
    #[must_use]
    pub fn taken(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|c| c.verdict == Verdict::Taken)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for candidate in &self.candidates {
            let verdict = match candidate.verdict {
                Verdict::Taken => "taken",
                Verdict::Usable => "usable",
                Verdict::Refused => "refused",
            };
            writeln!(
                f,
                "{verdict:8} {:14} {:12} {:>5}  {}",
                candidate.provider,
                candidate.domain,
                candidate.score,
                candidate.reasons.join("; ")
            )?;
        }
        Ok(())
    }
}

/// Does a policy's name match this offer: its provider, one of the layers, or its fabric?
fn matches_offer(name: &str, facts: &Capabilities) -> bool {
    matches_provider(name, &facts.provider) || name == facts.wire_name()
}

/// Ranks offers. Pure: the same facts give the same verdicts under the same libfabric. The
/// second part of the result is, for each candidate, its index in `offers`.
///
/// ```
/// use fabric::*;
/// let offers = Query::new(EndpointKind::Rdm).source("127.0.0.1").offers()?;
/// let facts: Vec<&Capabilities> = offers.iter().map(|offer| offer.capabilities()).collect();
/// // Bound to 127.0.0.1, no offer reaches another machine.
/// let (choice, order) = rank(&facts, &Requirements::ring(Locality::OtherMachines), &Policy::default());
/// assert!(choice.candidates.iter().all(|c| c.verdict == Verdict::Refused));
/// assert_eq!(order.len(), offers.len());
/// # Ok::<(), fabric::Error>(())
/// ```
#[must_use]
pub fn rank(
    offers: &[&Capabilities],
    need: &Requirements,
    policy: &Policy,
) -> (Choice, Vec<usize>) {
    rank_for_version(Version::running(), offers, need, policy)
}

fn rank_for_version(
    running: Version,
    offers: &[&Capabilities],
    need: &Requirements,
    policy: &Policy,
) -> (Choice, Vec<usize>) {
    let evaluate = |facts: &&Capabilities| {
        let (verdict, score, reasons) = match rejection_reason(running, facts, need, policy) {
            Some(reason) => (Verdict::Refused, 0, vec![reason]),
            None => {
                let points = score_terms(facts, need, policy);
                let score = points.iter().map(|(value, _)| value).sum();
                let reasons = points.iter().map(|(value, why)| format!("{why} ({value:+})"));
                (Verdict::Usable, score, reasons.collect())
            }
        };
        let provider = facts.provider.clone();
        let fabric = facts.fabric.clone();
        let domain = facts.domain.clone();
        Candidate { provider, fabric, domain, verdict, score, reasons }
    };
    let mut judged: Vec<_> = offers.iter().map(evaluate).enumerate().collect();
    // A stable sort: among equals, the provider that libfabric lists first.
    judged.sort_by_key(|(_, c)| (c.verdict == Verdict::Refused, -c.score));
    if let Some((_, first)) = judged.first_mut()
        && first.verdict == Verdict::Usable
    {
        first.verdict = Verdict::Taken;
    }
    let (order, candidates) = judged.into_iter().unzip();
    (Choice { candidates }, order)
}

/// The first requirement that an offer fails.
fn rejection_reason(
    running: Version,
    facts: &Capabilities,
    need: &Requirements,
    policy: &Policy,
) -> Option<String> {
    if let Some(name) = policy.deny.iter().find(|name| matches_offer(name, facts)) {
        return Some(format!("denied by policy (^{name})"));
    }
    if !policy.require.is_empty() && !policy.require.iter().any(|name| matches_offer(name, facts)) {
        return Some(format!("policy requires {}", policy.require.join(" or ")));
    }
    // A requirement that passed the check above names this provider.
    if policy.require.is_empty() && orphans_locks(&facts.provider, running) {
        return Some(ORPHANED_LOCK_REASON.to_owned());
    }
    if facts.endpoint != need.endpoint {
        return Some(format!("{:?} endpoints, {:?} needed", facts.endpoint, need.endpoint));
    }
    let missing = need.caps - facts.caps;
    if !missing.is_empty() {
        return Some(format!("lacks {}", names(&missing).join(", ")));
    }
    if need.memory.is_device() && !facts.caps.contains(Caps::DEVICE_MEMORY) {
        return Some(format!("does not register {} memory (no FI_HMEM)", need.memory));
    }
    if facts.immediates.write_data_size < need.immediate_bytes {
        return Some(match facts.immediates.write_data_size {
            0 => "writes carry no immediates (fi_writedata)".to_owned(),
            has => format!("immediates of {has} bytes, {} needed", need.immediate_bytes),
        });
    }
    if need.ordered && !facts.orders_writes() {
        return Some("does not promise the order of writes".to_owned());
    }
    if need.locality == Locality::OtherMachines {
        if !facts.reaches_other_machines {
            return Some("reaches only this machine".to_owned());
        }
        if facts.source.as_deref().is_some_and(is_loopback) {
            return Some("bound to the loopback address".to_owned());
        }
    }
    if facts.nic.as_ref().is_some_and(|nic| nic.link_up == Some(false)) {
        return Some("the link is down".to_owned());
    }
    None
}

fn is_loopback(address: &str) -> bool {
    address.starts_with("127.") || address.starts_with("[::1]")
}

/// Advantages and drawbacks of a usable offer.
fn score_terms(facts: &Capabilities, need: &Requirements, policy: &Policy) -> Vec<(i64, String)> {
    let mut points = Vec::new();
    let mut add = |value: i64, why: String| points.push((value, why));
    if let Some(place) = policy.prefer.iter().position(|name| matches_offer(name, facts)) {
        let rank = (policy.prefer.len() - place) as i64;
        add(1000 * rank, "preferred by policy".to_owned());
    }
    // An offer bound to the loopback address reaches only this machine, too, but it goes
    // through the network stack.
    let on_loopback = facts.source.as_deref().is_some_and(is_loopback);
    if need.locality == Locality::SameMachine && !facts.reaches_other_machines && !on_loopback {
        add(400, "shared memory, no network stack".to_owned());
    }
    if let Some(nic) = &facts.nic {
        // Each doubling of the link speed adds a little; a network card adds most.
        let gigabits = (nic.link_bits_per_second / 1_000_000_000).max(1);
        let speed = 10 * i64::from(gigabits.ilog2());
        let name = nic.name.as_deref().unwrap_or("a network card");
        add(200 + speed, format!("{name} moves the data, {gigabits} Gbit/s"));
    }
    if facts.layers() == 1 {
        add(20, "native, no layers".to_owned());
    } else {
        add(-10 * (facts.layers() as i64 - 1), format!("{} layers", facts.layers()));
    }
    if facts.orders_writes() {
        add(10, "keeps writes in order".to_owned());
    }
    if facts.immediates.write_data_size >= 8 {
        add(2, "64-bit immediates".to_owned());
    }
    if need.locality == Locality::SameMachine && on_loopback {
        add(5, "loopback address".to_owned());
    }
    for (name, value, why) in PENALTIES {
        if matches_provider(name, &facts.provider) {
            add(*value, (*why).to_owned());
        }
    }
    points
}

/// Ranks offers as [`rank`] does. For device memory it also *tries* the best offers, since a
/// provider may promise device memory that the library was not built for. The second part of
/// the result is, for each candidate, its index in `offers`.
#[must_use]
pub fn select(offers: &[&Offer], need: &Requirements, policy: &Policy) -> (Choice, Vec<usize>) {
    let facts: Vec<&Capabilities> = offers.iter().map(|offer| offer.capabilities()).collect();
    let (mut choice, order) = rank(&facts, need, policy);
    if need.memory.is_device() {
        probe_device_memory(&mut choice, &order, offers, need.memory);
    }
    (choice, order)
}

/// Queries all providers and selects the best offer.
///
/// ```
/// use fabric::*;
/// let query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
/// let need = Requirements::ring(Locality::SameMachine);
/// let policy: Policy = "tcp,^sockets".parse()?;
/// let (offer, choice) = choose(&query, &need, &policy)?;
/// let taken = choice.taken().unwrap();
/// assert_eq!(taken.provider, offer.capabilities().provider);
/// print!("{choice}"); // one line per candidate, with the reasons
///
/// let nothing = choose(&query, &need, &"=no-such-provider".parse()?).unwrap_err();
/// assert_eq!(nothing.kind(), ErrorKind::NoProvider);
/// # Ok::<(), fabric::Error>(())
/// ```
///
/// # Errors
/// `NoProvider` with the reason of every candidate in its text if none is usable;
/// `InvalidArgument` for a policy that contradicts itself.
pub fn choose(query: &Query, need: &Requirements, policy: &Policy) -> Result<(Offer, Choice)> {
    policy.check()?;
    // Providers without device memory are queried too, so that they are listed as refused, with
    // the reason.
    let device = if need.memory.is_device() { Caps::DEVICE_MEMORY } else { Caps::empty() };
    let wanted = [need.caps | device, need.caps];
    let (mut offers, failure) =
        merge(wanted.into_iter().map(|caps| query.clone().caps(caps).offers()));
    let candidates: Vec<&Offer> = offers.iter().collect();
    let (choice, order) = select(&candidates, need, policy);
    if let Some(at) = choice.candidates.iter().position(|c| c.verdict == Verdict::Taken) {
        let offer = offers.swap_remove(order[at]);
        let facts = offer.capabilities();
        tracing::info!(provider = %facts.provider, domain = %facts.domain, "provider taken");
        return Ok((offer, choice));
    }
    if choice.candidates.is_empty()
        && let Some(error) = failure
    {
        return Err(error);
    }
    let (count, reasons) = (choice.candidates.len(), group_by_reason(&choice));
    let detail = format!("all {count} candidates were refused: {reasons}");
    Err(Error::new(ErrorKind::NoProvider, "choose provider", detail))
}

/// The real test is a registration. The first candidate that passes it is selected.
fn probe_device_memory(
    choice: &mut Choice,
    order: &[usize],
    offers: &[&Offer],
    memory: MemoryKind,
) {
    for (candidate, at) in choice.candidates.iter_mut().zip(order) {
        if candidate.verdict == Verdict::Refused {
            continue;
        }
        match Domain::open(offers[*at]).and_then(|domain| domain.probe_memory(memory)) {
            Ok(()) => {
                candidate.verdict = Verdict::Taken;
                return;
            }
            Err(error) => {
                candidate.verdict = Verdict::Refused;
                candidate.score = 0;
                candidate.reasons = vec![error.to_string()];
            }
        }
    }
}

/// The providers grouped by reason: a machine with ten interfaces has many candidates and few
/// reasons.
fn group_by_reason(choice: &Choice) -> String {
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for candidate in &choice.candidates {
        let reason = candidate.reasons.join("; ");
        let at = reasons.iter().position(|(known, _)| *known == reason).unwrap_or_else(|| {
            reasons.push((reason, Vec::new()));
            reasons.len() - 1
        });
        let providers = &mut reasons[at].1;
        if !providers.contains(&candidate.provider.as_str()) {
            providers.push(&candidate.provider);
        }
    }
    let line =
        |(reason, providers): (String, Vec<&str>)| format!("{}: {reason}", providers.join(", "));
    reasons.into_iter().map(line).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
