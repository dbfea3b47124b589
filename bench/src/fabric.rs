//! `fabricast bench fabric`: cost of the fabric layer.

use serde::Serialize;

use super::core_pair::core_pair;
use super::report::{Common, Metrics, Report};
use crate::exchange::plan::{
    Exchange, FabricExchange, Mode, OfferQuery, Operation, Plan, ThreadingMode, Wait, name_of,
};
use crate::exchange::{Measured, initiator, measurement};
use command::exit::{Exit, Failure};
use command::{size, text};

/// The sequence number must fit an immediate of 32 bits.
const MOST_ITERATIONS: u64 = 1 << 30;

/// Two processes exchange data through one provider and verify it.
///
/// The last line of the output is one JSON object. benches/raw/raw_fabric.c makes the same exchange
/// with libfabric alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Exact name of the provider: shm, tcp, net, "tcp;ofi_rxm", …
    #[arg(long, value_name = "NAME")]
    provider: String,
    /// The measured operation
    #[arg(long = "op", value_enum, default_value_t = Operation::WriteData)]
    operation: Operation,
    /// Latency or bandwidth
    #[arg(long, value_enum, default_value_t = Mode::Lat)]
    mode: Mode,
    /// Bytes of a message; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64")]
    size: u64,
    /// Measured operations; accepts K, M, G
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "10000")]
    iterations: u64,
    /// Operations in flight, for bandwidth; limited by 64 MiB of memory
    #[arg(long, value_name = "N", value_parser = size::parse_positive, default_value = "16")]
    window: u64,
    /// Cores of the two processes, A,B [default: not pinned]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// How both sides wait; plain writes in latency mode need poll: their target has no completion
    #[arg(long, value_enum, default_value_t = Wait::Default)]
    waiting: Wait,
    /// The threading model declared to libfabric (each process has one thread)
    #[arg(long, value_enum, default_value_t = ThreadingMode::Safe)]
    threading: ThreadingMode,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct FabricMetrics {
    op: String,
    mode: String,
    window: Option<usize>,
    threading: String,
    libfabric: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let cores = core_pair(arguments.cores.as_deref())?;
    let (plan, measure) = plan(arguments, cores)?;
    let side = initiator::start(&plan, cores[0])?;
    let measured = measurement::run(side, &measure)?;
    report(arguments, &measure, measured).conclude(arguments.json)
}

fn plan(
    arguments: &Arguments,
    cores: [Option<usize>; 2],
) -> Result<(Plan, FabricExchange), Failure> {
    let refuse = |why: String| Failure::new(Exit::Usage, why);
    let iterations = arguments.iterations;
    if iterations > MOST_ITERATIONS {
        return Err(refuse(format!("at most {MOST_ITERATIONS} iterations")));
    }
    let (operation, mode) = (arguments.operation, arguments.mode);
    if operation == Operation::Write && mode == Mode::Lat && arguments.waiting != Wait::Poll {
        return Err(refuse(
            "a plain write generates no completion at the target, so it cannot be waited for asleep: \
             use --waiting poll, or --op writedata"
                .to_owned(),
        ));
    }
    let bytes = usize::try_from(arguments.size)
        .ok()
        .filter(|bytes| *bytes <= 1 << 40)
        .ok_or_else(|| refuse("--size is above the maximum of one transfer".to_owned()))?;
    let measure = FabricExchange {
        operation,
        mode,
        size: bytes,
        slots: FabricExchange::slots(operation, mode, bytes, arguments.window),
        iterations,
        warmup: (iterations / 10 + 1).min(1000),
    };
    let plan = Plan {
        offer_query: OfferQuery {
            threading: arguments.threading,
            ..OfferQuery::new(&arguments.provider)
        },
        waiting: arguments.waiting,
        core: cores[1],
        exchange: Exchange::Fabric(measure.clone()),
    };
    Ok((plan, measure))
}

fn report(
    arguments: &Arguments,
    measure: &FabricExchange,
    measured: Measured,
) -> Report<FabricMetrics> {
    // Half a round trip of a ping-pong, all of a read, the share of one operation in a window of a
    // stream.
    let share = match (measure.mode, measure.operation) {
        (Mode::Bw, _) => 1.0 / measure.slots as f64,
        (Mode::Lat, Operation::Read) => 1.0,
        (Mode::Lat, _) => 0.5,
    };
    let common = Common {
        provider: arguments.provider.clone(),
        waiting: name_of(arguments.waiting),
        cores: arguments.cores.clone(),
        ..measured.common(measure.mode, share, measure.size as u64, measure.iterations)
    };
    let found = FabricMetrics {
        op: name_of(measure.operation),
        mode: name_of(measure.mode),
        window: (measure.mode == Mode::Bw).then_some(measure.slots),
        threading: name_of(arguments.threading),
        libfabric: fabric::Version::running().to_string(),
    };
    Report::new(common, found)
}

impl Metrics for FabricMetrics {
    fn to_text(&self, common: &Common) -> String {
        let number =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        let cores = common.cores.as_ref().map_or("any".to_owned(), |cores| {
            cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
        });
        let head = [
            "provider",
            "op",
            "mode",
            "bytes",
            "iterations",
            "p50 µs",
            "p99 µs",
            "p99.9 µs",
            "GB/s",
            "waiting",
            "cpu µs",
            "peer cpu µs",
            "cores",
            "data",
        ];
        let row = [
            common.provider.clone(),
            self.op.clone(),
            self.mode.clone(),
            size::print(common.bytes),
            common.iterations.to_string(),
            number(common.p50_us),
            number(common.p99_us),
            number(common.p999_us),
            number(Some(common.gb_per_s)),
            common.waiting.clone(),
            number(common.cpu_us),
            number(common.peer_cpu_us),
            cores,
            if common.verified { "verified" } else { "CORRUPTED" }.to_owned(),
        ];
        text::table_of(head, std::iter::once(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(more: &[&str]) -> Arguments {
        use clap::{Args, FromArgMatches};
        let command = Arguments::augment_args(clap::Command::new("fabric"));
        let all = ["fabric", "--provider", "shm"].iter().chain(more);
        Arguments::from_arg_matches(&command.try_get_matches_from(all).unwrap()).unwrap()
    }

    fn json(more: &[&str], samples: Vec<u64>, elapsed: u64) -> String {
        let arguments = arguments(more);
        let (_, measure) = plan(&arguments, [None; 2]).unwrap();
        let measured = Measured {
            samples,
            elapsed,
            verified: true,
            processor_times: crate::exchange::ProcessorTimes::default(),
        };
        report(&arguments, &measure, measured).line().unwrap()
    }

    #[test]
    fn json_line_has_its_keys_in_order() {
        let text = json(&["--cores", "0,1"], vec![1000, 2000, 1500], 0);
        let fixed = "{\"p50_us\":0.75,\"p99_us\":1.0,\"p999_us\":1.0,\"gb_per_s\":0.085333,\
                     \"bytes\":64,\"iterations\":10000,\"provider\":\"shm\",\
                     \"waiting\":\"default\",\"cpu_us\":0.0,\"peer_cpu_us\":0.0,\"cores\":[0,1],\"verified\":true,";
        assert!(text.starts_with(fixed), "{text}");
    }

    #[test]
    fn stream_reports_shares_and_a_rate() {
        let more = ["--mode", "bw", "--size", "1M", "--iters", "100", "--window", "4"];
        let text = json(&more, vec![2000], 10_000_000);
        assert!(text.starts_with("{\"p50_us\":0.5,"), "{text}");
        assert!(text.contains("\"gb_per_s\":10.48576,"), "{text}");
        assert!(text.contains("\"cores\":null,"), "{text}");
        // Fewer operations than a window: no samples.
        let text = json(&more, vec![], 10_000_000);
        assert!(text.starts_with("{\"p50_us\":null,"), "{text}");
    }

    #[test]
    fn impossible_arguments_are_errors() {
        let sleeping = ["--op", "write", "--waiting", "block"];
        let failure = plan(&arguments(&sleeping), [None; 2]).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        assert!(plan(&arguments(&["--iters", "2G"]), [None; 2]).is_err());
        assert!(plan(&arguments(&["--size", "2048G"]), [None; 2]).is_err());
        let (_, measure) = plan(&arguments(&["--iters", "100"]), [None; 2]).unwrap();
        assert_eq!(measure.warmup, 11);
    }
}
