//! Measures like `fabricast bench queue`, with iceoryx2: a publisher, and readers in their own
//! processes; latency from before the call that sends to after the call that receives. Blocking
//! readers wait for iceoryx2's event, which the publisher sends after each message.
//!
//! iceoryx_queue READERS poll|block MESSAGES [CORE,CORE,...]

use std::error::Error;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use iceoryx2::prelude::*;

type Message = [u64; 3];

fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid pointer to a timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn pin(core: usize) {
    // SAFETY: our own set, of the passed size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

fn percentile(samples: &[u64], quantile: f64) -> f64 {
    samples[((samples.len() - 1) as f64 * quantile).round() as usize] as f64 / 1000.0
}

struct Plan {
    readers: usize,
    blocks: bool,
    messages: u64,
    cores: Vec<usize>,
}

fn main() -> Result<(), Box<dyn Error>> {
    set_log_level(LogLevel::Error);
    let arguments: Vec<String> = std::env::args().collect();
    let plan = Plan {
        readers: arguments[1].parse()?,
        blocks: arguments[2] == "block",
        messages: arguments[3].parse()?,
        cores: arguments.get(4).map_or(Ok(Vec::new()), |cores| {
            cores.split(',').map(str::parse).collect::<Result<_, _>>()
        })?,
    };
    match arguments.get(6) {
        Some(number) => read(&plan, &arguments[5], number.parse()?),
        None => publish(&plan, &arguments),
    }
}

fn publish(plan: &Plan, arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let name = format!("rivals/{}", std::process::id());
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service = node
        .service_builder(&name.as_str().try_into()?)
        .publish_subscribe::<Message>()
        .max_subscribers(plan.readers)
        .max_publishers(1)
        .subscriber_max_buffer_size(64)
        .enable_safe_overflow(false)
        .create()?;
    let event = node
        .service_builder(&name.as_str().try_into()?)
        .event()
        .max_listeners(plan.readers)
        .create()?;
    let publisher = service.publisher_builder().create()?;
    let notifier = event.notifier_builder().create()?;
    if let Some(core) = plan.cores.first() {
        pin(*core);
    }
    let mut readers = Vec::new();
    for number in 0..plan.readers {
        let cores = arguments.get(4).cloned().unwrap_or_default();
        let child = Command::new("/proc/self/exe")
            .args(&arguments[1..4])
            .args([cores.as_str(), name.as_str(), &number.to_string()])
            .stdout(Stdio::piped())
            .spawn()?;
        readers.push(child);
    }
    // All readers are connected once they are counted.
    let end = Instant::now() + Duration::from_secs(30);
    while service.dynamic_config().number_of_subscribers() < plan.readers
        || event.dynamic_config().number_of_listeners() < plan.readers
    {
        assert!(Instant::now() < end, "timed out waiting for readers");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(300));
    let pause = if plan.blocks { Duration::from_micros(150) } else { Duration::from_micros(4) };
    for number in 0..plan.messages {
        let resting = Instant::now();
        while resting.elapsed() < pause {
            std::hint::spin_loop();
        }
        let stamp = now();
        let sample = publisher.loan_uninit()?;
        let sample = sample.write_payload([stamp, number, stamp ^ number]);
        sample.send()?;
        if plan.blocks {
            notifier.notify()?;
        }
    }
    let mut all = Vec::new();
    for child in readers {
        let output = child.wait_with_output()?;
        assert!(output.status.success(), "a reader failed");
        let samples = output.stdout.chunks_exact(8);
        all.extend(samples.map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap_or_default())));
    }
    all.sort_unstable();
    println!(
        "{{\"p50_us\":{},\"p99_us\":{},\"p999_us\":{},\"bytes\":24,\"iterations\":{},\"provider\":\"iceoryx2\",\"waiting\":\"{}\",\"cores\":{:?},\"verified\":{},\"readers\":{},\"program\":\"iceoryx2 0.10\"}}",
        percentile(&all, 0.5),
        percentile(&all, 0.99),
        percentile(&all, 0.999),
        plan.messages,
        arguments[2],
        plan.cores,
        all.len() as u64 == plan.messages * plan.readers as u64,
        plan.readers,
    );
    Ok(())
}

fn read(plan: &Plan, name: &str, number: usize) -> Result<(), Box<dyn Error>> {
    if let Some(core) = plan.cores.get(number + 1) {
        pin(*core);
    }
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service = node.service_builder(&name.try_into()?).publish_subscribe::<Message>().open()?;
    let event = node.service_builder(&name.try_into()?).event().open()?;
    let listener = event.listener_builder().create()?;
    let subscriber = service.subscriber_builder().create()?;
    let mut samples = Vec::with_capacity(plan.messages as usize);
    let end = Instant::now() + Duration::from_secs(300);
    while (samples.len() as u64) < plan.messages {
        match subscriber.receive()? {
            Some(sample) => {
                let seen = now();
                let [stamp, number, both] = *sample;
                assert!(both == stamp ^ number && number == samples.len() as u64, "wrong data");
                samples.push(seen - stamp);
            }
            None if plan.blocks => {
                listener.timed_wait(|_| {}, Duration::from_secs(1))?;
            }
            None => std::hint::spin_loop(),
        }
        if samples.len() % 1024 == 0 {
            assert!(Instant::now() < end, "timed out waiting for messages");
        }
    }
    let bytes: Vec<u8> = samples.iter().flat_map(|sample| sample.to_ne_bytes()).collect();
    std::io::stdout().write_all(&bytes)?;
    Ok(())
}
