//! How it stands with the service of a node, in words for the log and for systemd.

use pubsub::Row;

/// What was seen at the last look.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The number of the service, whether this process is it, and where that listens.
    service: Option<(u32, bool, Option<String>)>,
}

impl Watch {
    /// Does the process do what it is there for? Not as long as it takes over.
    pub(super) fn is_settled(&self) -> bool {
        self.service.as_ref().is_some_and(|(_, serves, _)| *serves)
    }

    /// Gives, and logs, a line about the service, if it is another one or stands otherwise.
    pub(super) fn look(&mut self, rows: &[Row], serves: bool) -> Option<String> {
        let Some(Row::Node { identity, service, process, listens, .. }) = rows.first() else {
            return None;
        };
        let found = (*service, serves, listens.clone().filter(|_| serves));
        if self.service.as_ref() == Some(&found) {
            return None;
        }
        self.service = Some(found);
        let status = match serves {
            true => {
                let listens = listens.as_ref().map_or_else(
                    || "it does not listen for other nodes".to_owned(),
                    |address| format!("other nodes reach it at {address}"),
                );
                format!("serves node {identity} as its service number {service}; {listens}")
            }
            false => format!("process {process} serves node {identity}; taking it over"),
        };
        tracing::info!("{status}");
        Some(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(service: u32) -> Row {
        Row::Node {
            identity: "ab".to_owned(),
            label: "x".to_owned(),
            service,
            process: 7,
            listens: (service == 2).then(|| "10.0.0.1:1".to_owned()),
        }
    }

    #[test]
    fn only_changes_are_told() {
        let mut watch = Watch::default();
        let status = watch.look(&[node(1)], false);
        assert_eq!(status.unwrap(), "process 7 serves node ab; taking it over");
        assert!(!watch.is_settled());
        assert_eq!(watch.look(&[node(1)], false), None);
        let said = "serves node ab as its service number 2; other nodes reach it at 10.0.0.1:1";
        assert_eq!(watch.look(&[node(2)], true).unwrap(), said);
        assert!(watch.is_settled());
        let mut late = node(2);
        let Row::Node { listens, .. } = &mut late else { panic!() };
        *listens = None;
        let mut watch = Watch::default();
        let status = watch.look(&[late], true);
        assert!(status.unwrap().ends_with("it does not listen for other nodes"));
        assert_eq!(watch.look(&[node(2)], true).unwrap(), said);
    }
}
