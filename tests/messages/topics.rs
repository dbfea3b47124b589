//! Missing topics and nodes, different settings, and exceeded limits.

use std::os::unix::fs::PermissionsExt;

use crate::run::TestNode;

#[test]
fn report_on_a_node_that_does_not_run() {
    let why = "fabricast: report on node {directory}/node failed: not found: no process serves the node. Start \
               \"fabricast node\", or a publisher or subscriber, or name the directory of a node that runs: --directory \
               (by default it depends on XDG_RUNTIME_DIR)\n";
    let test_node = TestNode::new();
    test_node.fails(&["topics"], 6, why);
    test_node.fails(&["paths", "--topics"], 6, why);
}

#[test]
fn directory_of_another_user() {
    let test_node = TestNode::new();
    let open = test_node.path("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    let open = open.to_str().unwrap();
    for (command, operation) in [
        (&["pub", "t"][..], "join node"),
        (&["sub", "t"], "join node"),
        (&["topics"], "report on node"),
    ] {
        let why = format!(
            "fabricast: {operation} {{directory}}/open failed: denied: it is writable for other users (mode 777). chmod go-w \
             it. Choose a directory of this user: --directory\n"
        );
        test_node.fails(&[command, &["--directory", open]].concat(), 9, &why);
    }
}

#[test]
fn second_service_of_a_node() {
    let test_node = TestNode::new();
    let node = test_node.start(&["node"], None);
    let why = "fabricast: serve node {directory}/node failed: already served: process {process} already serves the node. \
               Stop that process first, or give this node its own directory: --directory\n";
    let words = [("process", &*node.id())];
    test_node.fails_with(&["node", "--log", "error"], ("", &[], &words), 10, why);
}

#[test]
fn stopped_service_is_named_with_the_remedy() {
    let test_node = TestNode::new();
    let node = test_node.start(&["node"], None);
    node.stop();
    let waiting = "fabricast: waiting for the node's service in {directory}/node (process {process}) to answer; it is \
                   stopped\n";
    let remedy = "it is stopped. To continue, resume it (kill -CONT {process}) or kill it (kill -KILL {process})\n";
    let id = node.id();
    let process = [("process", &*id)];
    let words = ("", &[][..], &process[..]);
    let late = "fabricast: report on node {directory}/node failed: deadline exceeded: process {process} serves the \
                node, and did not answer within 5s: ";
    let all = [waiting, late, remedy].concat();
    test_node.fails_with(&["topics"], words, 4, &all);
    test_node.fails_with(&["paths", "--topics"], words, 4, &all);
    let late = "fabricast: join node {directory}/node failed: deadline exceeded: process {process} serves the node, \
                and does not answer: ";
    for timeout in ["0.5", "1.5"] {
        let notice = if timeout == "0.5" { "" } else { waiting };
        for command in ["pub", "sub"] {
            let arguments = [command, "t", "--service-timeout", timeout];
            test_node.fails_with(&arguments, words, 4, &[notice, late, remedy].concat());
        }
    }
}

#[test]
fn missing_topic_times_out() {
    let why = "fabricast: waiting for topic \"t\": it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node)\n\
               fabricast: open topic \"t\" failed: it exists neither on this node nor on a connected peer within --timeout \
               (node directory: {directory}/node). Start a publisher first, or create it: --largest 1MiB\n";
    TestNode::new().fails(&["sub", "t", "--timeout", "0.2"], 4, why);
}

#[test]
fn missing_subscriber_times_out() {
    let why = "fabricast: waiting for 1 subscriber of topic \"t\" (node directory: {directory}/node)\n\
               fabricast: publish to topic \"t\" failed: 0 of 1 subscriber within --timeout. Start subscribers first, or \
               raise --timeout\n";
    let arguments = ["pub", "t", "--pattern", "--wait-for", "1", "--timeout", "0.2"];
    TestNode::new().fails(&arguments, 4, why);
}

#[test]
fn missing_message_times_out() {
    let why = "fabricast: waiting for messages of topic \"t\" (node directory: {directory}/node)\n\
               t: 0 messages, 0 B\n\
               fabricast: read topic \"t\" failed: no message within --timeout. Start a publisher, or raise --timeout\n";
    TestNode::new().fails(&["sub", "t", "--largest", "1K", "--timeout", "1.5"], 4, why);
}

#[test]
fn unreachable_peer_is_the_cause_of_a_timeout() {
    let why = "fabricast: waiting for 1 subscriber of topic \"t\" (node directory: {directory}/node)\n\
               fabricast: cannot reach 127.0.0.1:9: Connection refused (os error 111); retrying\n\
               fabricast: publish to topic \"t\" failed: 0 of 1 subscriber within --timeout; no peer node is connected: cannot \
               reach 127.0.0.1:9: Connection refused (os error 111). Start subscribers first, or raise --timeout\n";
    let publish = ["pub", "t", "--pattern", "--wait-for", "1", "--timeout", "2"];
    // Without the warning about --insecure, which contains the time.
    let quiet = ("", &[("FABRICAST_LOG", "error")][..], &[][..]);
    let publish = [&publish[..], &["--insecure", "--peers", "127.0.0.1:9"]].concat();
    TestNode::new().fails_with(&publish, quiet, 4, why);
    let why = "fabricast: waiting for topic \"t\": it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node)\n\
               fabricast: cannot reach 127.0.0.1:9: Connection refused (os error 111); retrying\n\
               fabricast: open topic \"t\" failed: it exists neither on this node nor on a connected peer within --timeout \
               (node directory: {directory}/node); no peer node is connected: cannot reach 127.0.0.1:9: Connection \
               refused (os error 111). Start a publisher first, or create it: --largest 1MiB\n";
    let subscribe = ["sub", "t", "--timeout", "2", "--insecure", "--peers", "127.0.0.1:9"];
    let test_node = TestNode::new();
    test_node.fails_with(&subscribe, quiet, 4, why);
    let ended = test_node.run_with(&[&subscribe[..], &["--json"]].concat(), "", quiet.1);
    let line: serde_json::Value = serde_json::from_str(&ended.output).unwrap();
    let error = line["error"].as_str().unwrap();
    assert!(ended.error.ends_with(&format!("fabricast: {error}\n")), "{line} {}", ended.error);
}

#[test]
fn absent_peers_are_the_cause_of_a_timeout() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let environment = [("FABRICAST_LOG", "error")];
    let words = [("address", &*address)];
    let quiet = ("", &environment[..], &words[..]);
    let test_node = TestNode::new();
    let listen = ["--insecure", "--listen", &address, "--timeout", "0.5"];
    let why = "fabricast: waiting for 1 subscriber of topic \"t\" (node directory: {directory}/node)\n\
               fabricast: publish to topic \"t\" failed: 0 of 1 subscriber within --timeout; no peer node has connected to \
               {address}. Start subscribers first, or raise --timeout\n";
    let publish = [&["pub", "t", "--pattern", "--wait-for", "1"][..], &listen].concat();
    test_node.fails_with(&publish, quiet, 4, why);
    let why = "fabricast: waiting for topic \"t\": it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node)\n\
               fabricast: open topic \"t\" failed: it exists neither on this node nor on a connected peer within --timeout \
               (node directory: {directory}/node); no peer node has connected to {address}. Start a publisher first, \
               or create it: --largest 1MiB\n";
    test_node.fails_with(&[&["sub", "t"][..], &listen].concat(), quiet, 4, why);
}

#[test]
fn more_than_the_budget() {
    let test_node = TestNode::new();
    let why = "fabricast: open topic \"t\" failed: over budget: 52 messages for queue, held samples and loans × 1073741824 bytes = \
               55834574848 bytes; topics already reserve 0 of a budget of 67108864 bytes. Reserve less (--largest, \
               --depth, --max-held, --loans), or serve the node with a larger budget (--budget-host, --budget-device)\n";
    test_node.fails(&["pub", "t", "--largest", "1G", "--budget-host", "64M"], 7, why);
}

#[test]
fn message_above_the_largest() {
    let test_node = TestNode::new();
    let why = "fabricast: publish test pattern failed: it has 2048 bytes, topic \"t\" allows 1024 (option --largest). Use \
               --largest 4K, and another name if other processes use the topic\n";
    let arguments = ["pub", "t", "--pattern", "--count", "1", "--size", "2K", "--largest", "1K"];
    test_node.fails(&arguments, 7, why);
    let why = "fabricast: publish standard input failed: it has more than 4 bytes, topic \"t\" allows 4 (option --largest). \
               Use a larger --largest, and another name if other processes use the topic\n";
    test_node.fails_with(&["pub", "t", "--largest", "4"], ("some input", &[], &[]), 7, why);
    let _sub = test_node.start(&["sub", "big", "--check", "--largest", "4K"], Some("big"));
    for (name, length, size) in [("big.bin", 10_000, "12K"), ("huge.bin", 3 << 20, "3M")] {
        let file = test_node.write(name, &"x".repeat(length));
        let why = format!(
            "fabricast: publish {{directory}}/{name} failed: it has {length} bytes, topic \"big\" allows 4096. Use another \
             topic name with --largest {size}, or stop the processes that use the topic first\n"
        );
        test_node.fails(&["pub", "big", "--file", file.to_str().unwrap()], 7, &why);
    }
    let why = "fabricast: publish a line of standard input failed: it has more than 4096 bytes, topic \"big\" allows 4096. \
               Use another topic name with a larger --largest, or stop the processes that use the topic first\n";
    test_node.fails_with(&["pub", "big", "--lines"], (&"x".repeat(5000), &[], &[]), 7, why);
}

#[test]
fn topic_with_other_settings() {
    let test_node = TestNode::new();
    let _sub = test_node.start(&["sub", "t", "--check", "--depth", "4"], Some("t"));
    let why = "fabricast: open topic \"t\" failed: settings differ: depth is 4, requested was 8 (option --depth). Omit all \
               topic settings to use it as it is, or set --depth 4, or choose another name. It can be recreated once \
               no process uses it\n";
    test_node.fails(&["pub", "t", "--depth", "8"], 2, why);
}

#[test]
fn missing_file_to_publish() {
    let why = "fabricast: read /nowhere/at/all failed: No such file or directory (os error 2)\n";
    TestNode::new().fails(&["pub", "t", "--file", "/nowhere/at/all"], 1, why);
}

#[test]
fn memory_of_a_missing_device() {
    let why = "fabricast: open emulated:99 failed: no such device: there are 2\n";
    TestNode::new().fails(&["pub", "t", "--memory", "emulated:99"], 3, why);
}

/// The node continues, since the other process may end.
#[test]
fn port_in_use() {
    let test_node = TestNode::new();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let _node = test_node.start(&["node", "--insecure", "--listen", &address], None);
    let ended = test_node.run(&["paths", "--topics"]);
    let flat = ended.output.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = format!(
        "no topics no topics are replicated with other nodes: listen for other nodes at address {address} failed: \
         cannot listen there: Address already in use (os error 98). Choose another port, or end the process that listens there; retrying. Choose another address: --listen"
    );
    assert_eq!(flat, expected);
}

#[test]
fn listen_address_of_another_machine() {
    let test_node = TestNode::new();
    // Reserved for documentation.
    let address = "192.0.2.9:7700";
    let _node = test_node.start(&["node", "--insecure", "--listen", address], None);
    let ended = test_node.run(&["paths", "--topics"]);
    let flat = ended.output.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "no topics no topics are replicated with other nodes: listen for other nodes at address \
                    192.0.2.9:7700 failed: cannot listen there: 192.0.2.9 is not an address of this \
                    machine. Choose one of: 127.0.0.1";
    assert!(flat.starts_with(expected), "{flat}");
}

/// In its own mount namespace, where this user may create one.
#[test]
fn directory_on_a_read_only_file_system() {
    let test_node = TestNode::new();
    let mount_point = test_node.path("ro");
    std::fs::create_dir(&mount_point).unwrap();
    let script =
        "mount -t tmpfs -o ro none \"$1\" || exit 77; exec \"$0\" pub t --directory \"$1/node\"";
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["-rm", "sh", "-c", script, env!("CARGO_BIN_EXE_fabricast")]).arg(&mount_point);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FABRICAST_")) {
        unshare.env_remove(name);
    }
    let Ok(ended) = unshare.stdin(std::process::Stdio::null()).output() else { return };
    let error = String::from_utf8_lossy(&ended.stderr);
    if ended.status.code() == Some(77) || error.starts_with("unshare:") {
        eprintln!("not tested: {error}");
        return;
    }
    let why = format!(
        "fabricast: join node {0}/node failed: Read-only file system (os error 30). Choose a directory that this user \
         can write in: --directory\n",
        mount_point.display()
    );
    assert_eq!((ended.status.code(), &*error), (Some(9), &*why));
}
