//! Topics and nodes that are not there, are others than was thought, or have no room.

use std::os::unix::fs::PermissionsExt;

use crate::run::TestNode;

#[test]
fn node_that_does_not_run() {
    let why = "fabricast: report on a node ({directory}/node) failed: not found: no process serves the node. Start \
               \"fabricast node\", or a publisher or subscriber, or name the directory of a node that runs: --directory \
               (by default it depends on XDG_RUNTIME_DIR)\n";
    let test_node = TestNode::new();
    test_node.says(&["topics"], 6, why);
    test_node.says(&["paths", "--topics"], 6, why);
}

#[test]
fn directory_of_another_user() {
    let test_node = TestNode::new();
    let open = test_node.path("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    let open = open.to_str().unwrap();
    for (command, operation) in [
        (&["pub", "t"][..], "join a node"),
        (&["sub", "t"], "join a node"),
        (&["topics"], "report on a node"),
    ] {
        let why = format!(
            "fabricast: {operation} ({{directory}}/open) failed: denied: it is writable for other users (mode 777). chmod go-w \
             it. Choose a directory of this user: --directory\n"
        );
        test_node.says(&[command, &["--directory", open]].concat(), 9, &why);
    }
}

#[test]
fn node_that_another_process_serves() {
    let test_node = TestNode::new();
    let node = test_node.start(&["node"], None);
    let why = "fabricast: serve a node ({directory}/node) failed: already served: process {process} already serves the node. Stop that process first, or give this node its own directory: --directory\n";
    let words = [("process", &*node.id())];
    test_node.says_with(&["node", "--log", "error"], ("", &[], &words), 10, why);
}

/// What is waited for is said, and in the end what to do.
#[test]
fn service_that_is_stopped() {
    let test_node = TestNode::new();
    let node = test_node.start(&["node"], None);
    node.stop();
    let waiting = "fabricast: waiting for the node's service in {directory}/node (process {process}) to answer; it is \
                   stopped\n";
    let remedy = "it is stopped. To continue, resume it (kill -CONT {process}) or kill it (kill -KILL {process})\n";
    let id = node.id();
    let process = [("process", &*id)];
    let words = ("", &[][..], &process[..]);
    let late = "fabricast: report on a node ({directory}/node) failed: deadline exceeded: process {process} serves the \
                node, and did not answer within 5s: ";
    let all = [waiting, late, remedy].concat();
    test_node.says_with(&["topics"], words, 4, &all);
    test_node.says_with(&["paths", "--topics"], words, 4, &all);
    let late = "fabricast: join a node ({directory}/node) failed: deadline exceeded: process {process} serves the node, \
                and does not answer: ";
    for timeout in ["0.5", "1.5"] {
        let said = if timeout == "0.5" { "" } else { waiting };
        for command in ["pub", "sub"] {
            let arguments = [command, "t", "--service-timeout", timeout];
            test_node.says_with(&arguments, words, 4, &[said, late, remedy].concat());
        }
    }
}

#[test]
fn topic_that_is_never_made() {
    let why = "fabricast: waiting for topic \"t\": it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node)\n\
               fabricast: open topic \"t\" failed: it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node). Start a publisher first, or create it: --largest 1MiB\n";
    TestNode::new().says(&["sub", "t", "--timeout", "0.2"], 4, why);
}

#[test]
fn subscriber_that_never_comes() {
    let why = "fabricast: waiting for 1 subscriber of topic \"t\" (node directory: {directory}/node)\n\
               fabricast: publish to topic \"t\" failed: 0 of 1 subscriber subscribed in time (--timeout). Start subscribers first, or \
               wait longer\n";
    let arguments = ["pub", "t", "--pattern", "--wait-for", "1", "--timeout", "0.2"];
    TestNode::new().says(&arguments, 4, why);
}

#[test]
fn messages_that_never_come() {
    let why = "fabricast: waiting for messages of topic \"t\" (node directory: {directory}/node)\n\
               t: 0 messages, 0 B\n\
               fabricast: read topic \"t\" failed: no message within --timeout\n";
    TestNode::new().says(&["sub", "t", "--largest", "1K", "--timeout", "1.5"], 4, why);
}

#[test]
fn peer_that_is_not_there() {
    let why = "fabricast: waiting for 1 subscriber of topic \"t\" (node directory: {directory}/node)\n\
               fabricast: cannot reach 127.0.0.1:9: Connection refused (os error 111); retrying\n\
               fabricast: publish to topic \"t\" failed: 0 of 1 subscriber subscribed in time (--timeout). Start subscribers first, or \
               wait longer; no peer node is connected: cannot reach 127.0.0.1:9: Connection refused (os error \
               111)\n";
    let publish = ["pub", "t", "--pattern", "--wait-for", "1", "--timeout", "2"];
    // Without the warning of what --insecure means, which has the time in it.
    let quiet = ("", &[("FABRICAST_LOG", "error")][..], &[][..]);
    let publish = [&publish[..], &["--insecure", "--peers", "127.0.0.1:9"]].concat();
    TestNode::new().says_with(&publish, quiet, 4, why);
    let why = "fabricast: waiting for topic \"t\": it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node)\n\
               fabricast: cannot reach 127.0.0.1:9: Connection refused (os error 111); retrying\n\
               fabricast: open topic \"t\" failed: it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node). Start a publisher first, or create it: --largest 1MiB; no peer node is connected: cannot reach 127.0.0.1:9: Connection refused (os error 111)\n";
    let subscribe = ["sub", "t", "--timeout", "2", "--insecure", "--peers", "127.0.0.1:9"];
    let test_node = TestNode::new();
    test_node.says_with(&subscribe, quiet, 4, why);
    let ended = test_node.run_with(&[&subscribe[..], &["--json"]].concat(), "", quiet.1);
    let line: serde_json::Value = serde_json::from_str(&ended.output).unwrap();
    let error = line["error"].as_str().unwrap();
    assert!(ended.error.ends_with(&format!("fabricast: {error}\n")), "{line} {}", ended.error);
}

#[test]
fn node_that_no_other_node_connects_to() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let environment = [("FABRICAST_LOG", "error")];
    let words = [("address", &*address)];
    let quiet = ("", &environment[..], &words[..]);
    let test_node = TestNode::new();
    let listen = ["--insecure", "--listen", &address, "--timeout", "0.5"];
    let why = "fabricast: waiting for 1 subscriber of topic \"t\" (node directory: {directory}/node)\n\
               fabricast: publish to topic \"t\" failed: 0 of 1 subscriber subscribed in time (--timeout). Start subscribers first, or \
               wait longer; no peer node has connected to {address}\n";
    let publish = [&["pub", "t", "--pattern", "--wait-for", "1"][..], &listen].concat();
    test_node.says_with(&publish, quiet, 4, why);
    let why = "fabricast: waiting for topic \"t\": it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node)\n\
               fabricast: open topic \"t\" failed: it exists neither on this node nor on a connected peer \
               (node directory: {directory}/node). Start a publisher first, or create it: --largest 1MiB; no peer node has connected to {address}\n";
    test_node.says_with(&[&["sub", "t"][..], &listen].concat(), quiet, 4, why);
}

#[test]
fn more_than_the_budget() {
    let test_node = TestNode::new();
    let why = "fabricast: open a topic (t) failed: over budget: 20 messages for queue and loans × 1073741824 bytes = \
               21474836480 bytes; topics already reserve 0 of a budget of 67108864 bytes. Reserve less (--largest, \
               --depth, --loans), or serve the node with a larger budget (--budget-host, --budget-device)\n";
    test_node.says(&["pub", "t", "--largest", "1G", "--budget-host", "64M"], 7, why);
}

#[test]
fn message_that_is_too_long() {
    let test_node = TestNode::new();
    let why = "fabricast: publish a message of the pattern failed: it has 2048 bytes, topic \"t\" takes 1024 at most (option --largest). Use --largest 4K, and another name if other processes use the topic\n";
    let arguments = ["pub", "t", "--pattern", "--count", "1", "--size", "2K", "--largest", "1K"];
    test_node.says(&arguments, 7, why);
    let why = "fabricast: the input has more than 4 bytes, and topic \"t\" takes 4 at most (option --largest). Publish it with a \
               larger --largest, under another name if other processes use the topic\n";
    test_node.says_with(&["pub", "t", "--largest", "4"], ("some input", &[], &[]), 7, why);
    let _sub = test_node.start(&["sub", "big", "--check", "--largest", "4K"], Some("big"));
    for (name, length, size) in [("big.bin", 10_000, "12K"), ("huge.bin", 3 << 20, "3M")] {
        let file = test_node.write(name, &"x".repeat(length));
        let why = format!(
            "fabricast: {{directory}}/{name} has {length} bytes, and topic \"big\" takes 4096 at most. Publish it under \
             another name with --largest {size}, or end the processes that use the topic first\n"
        );
        test_node.says(&["pub", "big", "--file", file.to_str().unwrap()], 7, &why);
    }
    let why = "fabricast: a line of the input has more than 4096 bytes, and topic \"big\" takes 4096 at most. Publish it under \
               another name with a larger --largest, or end the processes that use the topic first\n";
    test_node.says_with(&["pub", "big", "--lines"], (&"x".repeat(5000), &[], &[]), 7, why);
}

#[test]
fn topic_with_other_settings() {
    let test_node = TestNode::new();
    let _sub = test_node.start(&["sub", "t", "--check", "--depth", "4"], Some("t"));
    let why = "fabricast: open topic \"t\" failed: settings differ: depth is 4, requested was 8 (option --depth). Omit all topic settings to use it as it is, or set --depth 4, or choose another name. It can be recreated once no process uses it\n";
    test_node.says(&["pub", "t", "--depth", "8"], 2, why);
}

#[test]
fn file_to_publish_that_is_not_there() {
    let why = "fabricast: read /nowhere/at/all failed: No such file or directory (os error 2)\n";
    TestNode::new().says(&["pub", "t", "--file", "/nowhere/at/all"], 1, why);
}

#[test]
fn memory_of_a_device_that_is_not_there() {
    let why = "fabricast: emulated:99: open failed: no such device: there are 2\n";
    TestNode::new().says(&["pub", "t", "--memory", "emulated:99"], 3, why);
}

/// It says so, and goes on: the other process may end.
#[test]
fn port_that_another_node_has() {
    let test_node = TestNode::new();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let _node = test_node.start(&["node", "--insecure", "--listen", &address], None);
    let ended = test_node.run(&["paths", "--topics"]);
    let flat = ended.output.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = format!(
        "no topics no topics are replicated with other nodes: listen for other nodes ({address}) failed: cannot listen \
         there: Address already in use (os error 98). Choose another port, or end the process that listens there; retrying. Choose another address: --listen"
    );
    assert_eq!(flat, expected);
}

#[test]
fn address_to_listen_at_of_another_machine() {
    let test_node = TestNode::new();
    // For documentation, and therefore of no machine.
    let address = "192.0.2.9:7700";
    let _node = test_node.start(&["node", "--insecure", "--listen", address], None);
    let ended = test_node.run(&["paths", "--topics"]);
    let flat = ended.output.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "no topics no topics are replicated with other nodes: listen for other nodes (192.0.2.9:7700) failed: \
                    cannot listen there: 192.0.2.9 is not an address of this machine. Choose one of: 127.0.0.1";
    assert!(flat.starts_with(expected), "{flat}");
}

/// In a mount namespace of its own, where this user may make one.
#[test]
fn directory_on_a_file_system_that_is_read_only() {
    let test_node = TestNode::new();
    let place = test_node.path("ro");
    std::fs::create_dir(&place).unwrap();
    let script =
        "mount -t tmpfs -o ro none \"$1\" || exit 77; exec \"$0\" pub t --directory \"$1/node\"";
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["-rm", "sh", "-c", script, env!("CARGO_BIN_EXE_fabricast")]).arg(&place);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FABRICAST_")) {
        unshare.env_remove(name);
    }
    let Ok(ended) = unshare.stdin(std::process::Stdio::null()).output() else { return };
    let said = String::from_utf8_lossy(&ended.stderr);
    if ended.status.code() == Some(77) || said.starts_with("unshare:") {
        eprintln!("not tested: {said}");
        return;
    }
    let why = format!(
        "fabricast: join a node ({0}/node) failed: Read-only file system (os error 30). Choose a directory that this user \
         can write in: --directory\n",
        place.display()
    );
    assert_eq!((ended.status.code(), &*said), (Some(9), &*why));
}
