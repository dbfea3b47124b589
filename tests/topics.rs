//! Topics with several processes of the command.

#[path = "topics/inter_node.rs"]
mod inter_node;
#[path = "topics/payloads.rs"]
mod payloads;
#[path = "topics/service.rs"]
mod service;
#[path = "topics/termination.rs"]
mod termination;
#[path = "topics/test_node.rs"]
mod test_node;
#[path = "topics/user_errors.rs"]
mod user_errors;
