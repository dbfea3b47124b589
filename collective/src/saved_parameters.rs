//! Saves parameters that were learnt as JSON, and loads them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::controller::Controller;
use crate::operation::{OpKey, Operation, SizeClass};
use crate::parameters::{Algorithm, Parameters};
use reduction::DataType;

/// Version of the JSON. Another one is refused.
const VERSION: u64 = 1;

/// Parameters that were learnt on machines of one topology.
///
/// ```
/// use collective::{OpKey, Parameters, SavedParameters};
/// let key = OpKey::of_row(20).unwrap();
/// let saved = SavedParameters { parameters: vec![(key, Parameters::default())] };
/// let json = saved.to_json("8 GPUs");
/// assert_eq!(SavedParameters::from_json(&json, "8 GPUs").unwrap(), saved);
/// let error = SavedParameters::from_json(&json, "4 GPUs").unwrap_err();
/// assert!(error.to_string().contains("topology \"8 GPUs\""));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SavedParameters {
    /// Parameters of each key.
    pub parameters: Vec<(OpKey, Parameters)>,
}

/// Reason why saved parameters cannot be loaded.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The text is not JSON, or a field is missing, unknown, or of another type.
    Json(serde_json::Error),
    /// The parameters were saved by another version.
    Version {
        /// Version that saved them.
        found: u64,
    },
    /// The parameters were learnt on another topology.
    Domain {
        /// Topology of the saved parameters.
        found: String,
        /// Topology of this machine.
        expected: String,
    },
    /// No operation, data type or algorithm has this name.
    Name {
        /// Name of the field.
        field: &'static str,
        /// Name that is unknown.
        found: String,
    },
    /// A number is out of range.
    Value {
        /// Name of the field.
        field: &'static str,
        /// Number that is out of range.
        found: u64,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("saved parameters cannot be loaded: ")?;
        match self {
            Self::Json(cause) => write!(f, "invalid JSON: {cause}"),
            Self::Version { found } => {
                write!(f, "their version is {found}, this build expects {VERSION}. ")?;
                f.write_str("Delete them to learn anew")
            }
            Self::Domain { found, expected } => {
                write!(f, "they were learnt on topology {found:?}, this is {expected:?}. ")?;
                f.write_str("Save them to one file per topology")
            }
            Self::Name { field, found } => write!(f, "{field} {found:?} is unknown"),
            Self::Value { field, found } => write!(f, "{field} {found} is out of range"),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Json(cause) => Some(cause),
            _ => None,
        }
    }
}

/// Only the version: later versions may have other fields.
#[derive(Deserialize)]
struct Header {
    version: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u64,
    domain: String,
    parameters: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    operation: String,
    data_type: String,
    largest_bytes: u64,
    alpha: u64,
    chunk_bits: u64,
    stripes: u64,
    algorithm: String,
}

impl Entry {
    fn new(key: OpKey, parameters: Parameters) -> Self {
        Self {
            operation: key.operation.name().to_owned(),
            data_type: key.data_type.name().to_owned(),
            largest_bytes: key.size_class.largest(),
            alpha: parameters.alpha.into(),
            chunk_bits: parameters.chunk_bits.into(),
            stripes: parameters.stripes.into(),
            algorithm: parameters.algorithm.name().to_owned(),
        }
    }

    fn key(&self) -> Result<OpKey, LoadError> {
        let size_class = SizeClass::of(self.largest_bytes);
        if size_class.largest() != self.largest_bytes {
            return Err(LoadError::Value { field: "largest_bytes", found: self.largest_bytes });
        }
        Ok(OpKey {
            operation: named("operation", &self.operation, &Operation::ALL, Operation::name)?,
            data_type: named("data_type", &self.data_type, &DataType::ALL, DataType::name)?,
            size_class,
        })
    }

    fn parameters(&self) -> Result<Parameters, LoadError> {
        let chunk_bits = up_to("chunk_bits", self.chunk_bits, Parameters::MAX_CHUNK_BITS.into())?;
        Ok(Parameters {
            alpha: up_to("alpha", self.alpha, Parameters::FAST_ONLY)?,
            chunk_bits: chunk_bits as u8,
            stripes: up_to("stripes", self.stripes, u8::MAX.into())? as u8,
            algorithm: named("algorithm", &self.algorithm, &Algorithm::ALL, Algorithm::name)?,
        })
    }
}

fn named<T: Copy>(
    field: &'static str,
    name: &str,
    all: &[T],
    name_of: fn(T) -> &'static str,
) -> Result<T, LoadError> {
    let found = all.iter().copied().find(|value| name_of(*value) == name);
    found.ok_or_else(|| LoadError::Name { field, found: name.to_owned() })
}

fn up_to(field: &'static str, found: u64, most: u16) -> Result<u16, LoadError> {
    let value = u16::try_from(found).ok().filter(|value| *value <= most);
    value.ok_or(LoadError::Value { field, found })
}

impl SavedParameters {
    /// JSON of the parameters, learnt on this topology.
    ///
    /// # Panics
    ///
    /// Never: numbers and strings have a JSON form.
    #[must_use]
    pub fn to_json(&self, domain: &str) -> String {
        let entry = |(key, parameters): &(OpKey, Parameters)| Entry::new(*key, *parameters);
        let document = Document {
            version: VERSION,
            domain: domain.to_owned(),
            parameters: self.parameters.iter().map(entry).collect(),
        };
        serde_json::to_string_pretty(&document).expect("numbers and strings have a JSON form")
    }

    /// Sets these parameters in a controller.
    pub fn load_into(&self, controller: &mut Controller) {
        self.parameters.iter().for_each(|(key, parameters)| controller.load(*key, *parameters));
    }

    /// Parameters of JSON that [`to_json`](Self::to_json) made on the same topology.
    ///
    /// # Errors
    ///
    /// If the text is other JSON or none, or was saved by another version or on another topology.
    pub fn from_json(json: &str, domain: &str) -> Result<Self, LoadError> {
        let Header { version } = serde_json::from_str(json).map_err(LoadError::Json)?;
        if version != VERSION {
            return Err(LoadError::Version { found: version });
        }
        let document: Document = serde_json::from_str(json).map_err(LoadError::Json)?;
        if document.domain != domain {
            let expected = domain.to_owned();
            return Err(LoadError::Domain { found: document.domain, expected });
        }
        let entries = document.parameters.iter();
        let parameters = entries.map(|entry| Ok((entry.key()?, entry.parameters()?)));
        Ok(Self { parameters: parameters.collect::<Result<_, _>>()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::parameters::tests::any_parameters;

    fn json_with(field: &str, value: &str) -> String {
        let parameters = vec![(OpKey::of_row(20).unwrap(), Parameters::default())];
        let json = SavedParameters { parameters }.to_json("d");
        let mut lines: Vec<String> = json.lines().map(str::to_owned).collect();
        let line = lines.iter_mut().find(|line| line.contains(&format!("\"{field}\":"))).unwrap();
        let comma = if line.ends_with(',') { "," } else { "" };
        *line = format!("\"{field}\": {value}{comma}");
        lines.join("\n")
    }

    fn error_with(field: &str, value: &str) -> LoadError {
        SavedParameters::from_json(&json_with(field, value), "d").unwrap_err()
    }

    proptest! {
        #[test]
        fn saved_parameters_are_loaded(
            rows in prop::collection::vec((0..OpKey::COUNT, any_parameters()), 0..20),
            domain: String,
        ) {
            let parameters = rows.into_iter().map(|(row, parameters)| {
                (OpKey::of_row(row).unwrap(), parameters)
            });
            let saved = SavedParameters { parameters: parameters.collect() };
            let json = saved.to_json(&domain);
            prop_assert_eq!(SavedParameters::from_json(&json, &domain).unwrap(), saved);
        }

        #[test]
        fn damaged_json_never_panics(at: prop::sample::Index, byte in 0_u8..128, text: String) {
            _ = SavedParameters::from_json(&text, "d");
            let mut json = json_with("alpha", "870").into_bytes();
            let at = at.index(json.len());
            json[at] = byte;
            let json = String::from_utf8(json).unwrap();
            if let Ok(saved) = SavedParameters::from_json(&json, "d") {
                for (_, parameters) in saved.parameters {
                    prop_assert_eq!(Parameters::decode(parameters.encode()), Some(parameters));
                }
            }
        }
    }

    #[test]
    fn other_versions_and_topologies_are_refused() {
        let error = error_with("version", "2");
        assert!(matches!(error, LoadError::Version { found: 2 }), "{error}");
        let error = SavedParameters::from_json(r#"{"version": 7, "rows": []}"#, "d").unwrap_err();
        assert!(matches!(error, LoadError::Version { found: 7 }), "{error}");
        let error = error_with("domain", "\"e\"");
        assert_eq!(
            error.to_string(),
            "saved parameters cannot be loaded: they were learnt on topology \"e\", this is \"d\". \
             Save them to one file per topology"
        );
    }

    #[test]
    fn unknown_names_are_named() {
        for field in ["operation", "data_type", "algorithm"] {
            let error = error_with(field, "\"of tomorrow\"");
            let LoadError::Name { field: found_field, found } = &error else { panic!("{error}") };
            assert_eq!((*found_field, found.as_str()), (field, "of tomorrow"));
        }
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        let invalid = [
            ("alpha", 1001),
            ("chunk_bits", 41),
            ("stripes", 256),
            ("largest_bytes", 3),
            ("largest_bytes", u64::MAX),
            ("alpha", u64::MAX),
        ];
        for (field, value) in invalid {
            let error = error_with(field, &value.to_string());
            let LoadError::Value { field: found_field, found } = error else { panic!("{error}") };
            assert_eq!((found_field, found), (field, value));
        }
    }

    #[test]
    fn text_that_is_not_such_json_is_refused() {
        for text in ["", "{", "[]", "{}", r#"{"version": "1"}"#, r#"{"version": 1}"#] {
            let error = SavedParameters::from_json(text, "d").unwrap_err();
            assert!(matches!(error, LoadError::Json(_)), "{error}");
        }
        let error = error_with("alpha", "-1");
        assert!(matches!(error, LoadError::Json(_)), "{error}");
    }
}
