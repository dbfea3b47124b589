//! `fabricast bench ring`: messages through a ring.

use fabric::ring::NotifyMode;
use serde::Serialize;

use super::core_pair::core_pair;
use super::progress::Progress;
use super::report::{Common, Metrics, Report, rounded};
use crate::exchange::plan::{Exchange, Mode, OfferQuery, Plan, RingExchange, Wait, name_of};
use crate::exchange::ring_exchange::{self, RingResult};
use crate::exchange::{initiator, remote};
use command::exit::{Exit, Failure};
use command::size;

/// Two processes send messages through rings and verify them: both on this machine, or a server,
/// and a client with its address.
///
/// Both sides poll inline, in one thread each. The last line of the output is one JSON object.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Exact name of the provider: shm, tcp, net, "tcp;ofi_rxm", …
    #[arg(long, value_name = "NAME")]
    provider: String,
    /// Latency or bandwidth
    #[arg(long, value_enum, default_value_t = Mode::Lat)]
    mode: Mode,
    /// Bytes of a message, which may be much larger than the ring; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64")]
    size: u64,
    /// Bytes of the ring; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "8M")]
    ring_size: u64,
    /// Bytes that are read before the writer gets credit, 0: after each chunk [default: a quarter
    /// of the ring]
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    watermark: Option<u64>,
    /// Bytes of payload in a chunk, at most; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "1M")]
    chunk: u64,
    /// How the reader is notified of writes: imm, by an immediate with the write; msg, by a message
    /// after it [default: the best that the provider supports]
    #[arg(long, value_name = "FORM", value_parser = parse_notify)]
    notify: Option<NotifyMode>,
    /// Measured messages; accepts K, M, G
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "10000")]
    iterations: u64,
    /// Cores of the two processes, A,B [default: not pinned]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// How both sides wait
    #[arg(long, value_enum, default_value_t = Wait::Default)]
    waiting: Wait,
    /// Local address to bind to, for network providers [default: the loopback address, or that of
    /// the connection to the other side]
    #[arg(long, value_name = "ADDRESS")]
    source: Option<String>,
    /// Wait for a client at this address, and serve its exchange once; the client sets all options
    /// but the provider and the source
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = CLIENT_ONLY)]
    serve: Option<String>,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
    /// Address of a server, on this or another machine [default: start a second process here]
    #[arg(value_name = "HOST:PORT")]
    server: Option<String>,
}

/// Options that a server gets from its client, or does not use.
const CLIENT_ONLY: [&str; 11] = [
    "server",
    "mode",
    "size",
    "ring_size",
    "watermark",
    "chunk",
    "notify",
    "iterations",
    "cores",
    "waiting",
    "json",
];

fn parse_notify(text: &str) -> Result<NotifyMode, String> {
    let found = NotifyMode::ALL.into_iter().find(|mode| mode.name() == text);
    found.ok_or_else(|| format!("one of {}", NotifyMode::ALL.map(NotifyMode::name).join(", ")))
}

#[derive(Debug, Serialize)]
pub(crate) struct RingMetrics {
    mode: String,
    notify: &'static str,
    ring_size: u64,
    watermark: u64,
    chunk: u64,
    /// Credits received by the writer, and how long it waited for them.
    credits: u64,
    blocked_us: f64,
    libfabric: String,
}

/// Maximum memory of a server, as requested by a client; and of either side.
const MAX_CLIENT_MEMORY: u64 = 4 << 30;
const MAX_MEMORY: u64 = 64 << 30;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let offer_query =
        OfferQuery { source: arguments.source.clone(), ..OfferQuery::new(&arguments.provider) };
    if let Some(source) = &arguments.source {
        check_source(&arguments.provider, source)?;
    }
    if let Some(address) = &arguments.serve {
        let source = arguments.source.as_deref();
        return remote::serve(address, &arguments.provider, source, |plan| match &plan.exchange {
            Exchange::Ring(ring_exchange) => check_client_request(ring_exchange),
            _ => Err(Failure::new(
                Exit::Usage,
                "the client requested an exchange that is not a ring",
            )),
        });
    }
    let ring_exchange = RingExchange {
        mode: arguments.mode,
        size: arguments.size,
        capacity: arguments.ring_size,
        watermark: arguments.watermark.unwrap_or(arguments.ring_size / 4),
        chunk: arguments.chunk,
        notify: arguments.notify,
        iterations: arguments.iterations,
        warmup: (arguments.iterations / 10 + 1).min(1000),
    };
    check(&ring_exchange)?;
    let [local, remote] = core_pair(arguments.cores.as_deref())?;
    let plan = Plan {
        offer_query,
        waiting: arguments.waiting,
        core: remote,
        exchange: Exchange::Ring(ring_exchange.clone()),
    };
    let has_no_server = arguments.server.is_none();
    let target_memory = if has_no_server { ring_exchange.memory_of_target() } else { 0 };
    command::memory::check(
        "measure a ring",
        ring_exchange.memory_of_initiator().saturating_add(target_memory),
        "Use a smaller --ring-size or --size",
    )?;
    let what = format!(
        "{} {} over {}",
        ring_exchange.iterations,
        describe_messages(ring_exchange.size),
        plan.offer_query.provider
    );
    let progress = Progress::begin(what);
    let side = match &arguments.server {
        Some(address) => remote::connect(&plan, address, local)?,
        None => initiator::start(&plan, local)?,
    };
    let result = ring_exchange::run(side, &ring_exchange)?;
    drop(progress);
    let settings = Common {
        provider: arguments.provider.clone(),
        waiting: name_of(arguments.waiting),
        cores: arguments.cores.clone(),
        ..Common::default()
    };
    report(settings, &ring_exchange, result).conclude(arguments.json)
}

/// An address is for network providers: a local one would use it as a name, the same for both
/// sides.
fn check_source(provider: &str, source: &str) -> Result<(), Failure> {
    if OfferQuery::new(provider).is_network() == Some(false) {
        return Err(Failure::new(
            Exit::Usage,
            format!(
                "--source {source}: {provider} never leaves the machine and has no addresses to \
                 bind to; both sides would take this as the same name"
            ),
        ));
    }
    Ok(())
}

fn refuse(why: impl Into<String>) -> Result<(), Failure> {
    Err(Failure::new(Exit::Usage, why))
}

/// Checks the request of a client, which must not use all memory.
fn check_client_request(ring_exchange: &RingExchange) -> Result<(), Failure> {
    check(ring_exchange)?;
    let bytes = ring_exchange.memory_of_target();
    if bytes > MAX_CLIENT_MEMORY {
        return refuse(format!(
            "this would take {} of the server's memory, for the ring and what it sends from; a client may \
             have {}",
            size::amount(bytes as f64),
            size::print(MAX_CLIENT_MEMORY),
        ));
    }
    Ok(())
}

/// Checks arguments, also those of a client.
fn check(ring_exchange: &RingExchange) -> Result<(), Failure> {
    if !ring_exchange.has_valid_capacity() {
        let capacity = ring_exchange.capacity;
        return refuse(format!(
            "--ring-size {capacity}: a ring has 1024 bytes to 1024G: powers of two, or up to \
             2097024 bytes any multiple of 128 bytes, and beyond that of a 16384th of it rounded up \
             to a power of two; {} would do",
            capacity.clamp(1 << 10, 1 << 40).next_power_of_two(),
        ));
    }
    if ring_exchange.iterations > 1 << 30
        || ring_exchange.warmup > 1 << 30
        || ring_exchange.size > 1 << 40
        || ring_exchange.size == 0
    {
        return refuse("at most 1G messages, of 1024G each");
    }
    let bytes = ring_exchange.memory_of_initiator();
    if bytes > MAX_MEMORY {
        return refuse(format!(
            "this needs {bytes} bytes of memory ({}), for the ring and four messages to send from; at most {} are for a \
             measurement. Use a smaller --ring-size or --size",
            size::amount(bytes as f64),
            size::print(MAX_MEMORY),
        ));
    }
    if ring_exchange.chunk == 0 {
        return refuse("--chunk is at least 1");
    }
    Ok(())
}

/// The report of an exchange with these settings.
pub(crate) fn report(
    settings: Common,
    ring_exchange: &RingExchange,
    result: RingResult,
) -> Report<RingMetrics> {
    let RingResult { measured, notify, credits, blocked } = result;
    // Half a round trip of a ping-pong, one message's share of a stream.
    let share = if ring_exchange.mode == Mode::Lat { 0.5 } else { 1.0 };
    let RingExchange { mode, size, iterations, .. } = *ring_exchange;
    let Common { provider, waiting, cores, .. } = settings;
    let common =
        Common { provider, waiting, cores, ..measured.common(mode, share, size, iterations) };
    let found = RingMetrics {
        mode: name_of(ring_exchange.mode),
        notify,
        credits,
        blocked_us: rounded(blocked.as_secs_f64() * 1e6),
        ring_size: ring_exchange.capacity,
        watermark: ring_exchange.watermark.min(ring_exchange.capacity / 2),
        chunk: ring_exchange.chunk,
        libfabric: fabric::Version::running().to_string(),
    };
    Report::new(common, found)
}

impl Metrics for RingMetrics {
    fn to_text(&self, common: &Common) -> String {
        let [p50, p99, p999] = common.percentiles();
        let what = if self.mode == "lat" { "one way" } else { "for each message" };
        let verified = if common.verified { "verified" } else { "NOT VERIFIED" };
        format!(
            "{}: {} {} through a ring of {} over {}, {}: {what} p50 {p50:.3} us, p99 {p99:.3} us, \
             p99.9 {p999:.3} us; {:.3} GB/s; {verified}\n",
            self.mode,
            common.iterations,
            describe_messages(common.bytes),
            size::print(self.ring_size),
            common.provider,
            self.notify,
            common.gb_per_s,
        ) + &common.waiting_line("the peer")
    }
}

fn describe_messages(bytes: u64) -> String {
    let unit = if bytes < 1 << 10 || !bytes.is_multiple_of(1 << 10) { " bytes" } else { "" };
    format!("messages of {}{unit}", size::print(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring_exchange(mode: Mode, size: u64, capacity: u64) -> RingExchange {
        RingExchange {
            mode,
            size,
            capacity,
            watermark: 0,
            chunk: 1 << 20,
            notify: None,
            iterations: 1,
            warmup: 1,
        }
    }

    #[test]
    fn client_cannot_request_all_memory() {
        let is_good = |mode, size, capacity| {
            check_client_request(&ring_exchange(mode, size, capacity)).is_ok()
        };
        assert!(is_good(Mode::Lat, 64, 8 << 20));
        assert!(is_good(Mode::Lat, 256 << 20, 8 << 20));
        assert!(!is_good(Mode::Lat, 1 << 30, 8 << 20));
        // Here the server only reads, in its ring.
        assert!(is_good(Mode::Bw, 8 << 30, 8 << 20));
        assert!(!is_good(Mode::Bw, 64, 8 << 30));
        for mode in [Mode::Lat, Mode::Bw] {
            assert!(!is_good(mode, 1 << 40, 8 << 20));
            assert!(!is_good(mode, u64::MAX, 8 << 20));
            assert!(!is_good(mode, 64, 1 << 40));
        }
    }

    #[test]
    fn invalid_ring_size_is_answered_with_a_valid_one() {
        for (capacity, near) in [(1000, "1024 would do"), (3000, "4096 would do")] {
            let text = check(&ring_exchange(Mode::Bw, 64, capacity)).unwrap_err().to_string();
            assert!(text.contains(near), "{text}");
        }
        for capacity in [1024, 1024 + 128, 2_097_024, 1 << 40] {
            assert!(ring_exchange(Mode::Bw, 64, capacity).has_valid_capacity(), "{capacity}");
        }
        assert!(!ring_exchange(Mode::Bw, 64, u64::MAX).has_valid_capacity());
        let too_large = check(&ring_exchange(Mode::Bw, 64, u64::MAX)).unwrap_err().to_string();
        assert!(too_large.contains("would do"), "{too_large}");
    }
}
