//! The macro that declares settings: it creates a structure with a field for each, and the table of
//! all.

use super::Settings;
use super::value::ValueForm;

/// Subject of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// The process at its node, and the node among other nodes.
    Node,
    /// A new topic.
    Topic,
}

impl Group {
    /// The group's prefix of setting names.
    pub(super) fn full(self, name: &str, separator: char) -> String {
        match self {
            Self::Node => name.to_owned(),
            Self::Topic => format!("topic{separator}{name}"),
        }
    }
}

/// The declaration of a setting.
#[derive(Debug)]
pub(crate) struct Declaration {
    pub(crate) group: Group,
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    /// The default, in words.
    pub(crate) default: &'static str,
    pub(crate) about: &'static str,
    /// The environment variable.
    pub(crate) variable: String,
    /// The option, without the dashes.
    pub(crate) option: String,
    pub(crate) form: ValueForm,
    /// Reads the value from a text with this origin.
    pub(super) read: fn(&mut Settings, &str, &str) -> Result<(), String>,
    /// Writes the value as `read` accepts it.
    pub(crate) write: fn(&Settings) -> String,
    /// The value as JSON.
    pub(crate) json: fn(&Settings) -> serde_json::Value,
    pub(super) origin: fn(&Settings) -> Option<&str>,
}

impl Declaration {
    /// The origin of the value.
    pub(crate) fn origin<'a>(&self, settings: &'a Settings) -> &'a str {
        (self.origin)(settings).unwrap_or("default")
    }

    /// Is the setting set?
    pub(crate) fn is_set(&self, settings: &Settings) -> bool {
        (self.origin)(settings).is_some()
    }

    /// The unique name, with the group: `topic.depth`.
    pub(crate) fn full_name(&self) -> String {
        self.group.full(self.name, '.')
    }
}

/// The value of a setting, and its origin.
#[derive(Debug, Clone)]
pub(crate) struct Setting<T> {
    pub(crate) value: T,
    /// The origin, if set: `option --depth`.
    pub(crate) origin: Option<String>,
}

impl<T> Setting<T> {
    /// Is it set?
    pub(crate) fn is_set(&self) -> bool {
        self.origin.is_some()
    }
}

/// Declares all settings: `name: Type = default, "default, in words", check;`, grouped, each with a
/// line of documentation.
macro_rules! declare {
    ($($group:ident { $(
        #[doc = $about:literal]
        $name:ident: $type:ty = $default:expr, $words:literal, $check:expr;
    )* })*) => {
        /// Every setting with its origin.
        #[derive(Debug, Clone)]
        pub(crate) struct Settings {
            $($(#[doc = $about] pub(crate) $name: Setting<$type>,)*)*
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($($name: Setting { value: $default, origin: None },)*)* }
            }
        }

        /// The declarations in order.
        pub(crate) static TABLE: LazyLock<Vec<Declaration>> = LazyLock::new(|| vec![$($({
            let group = Group::$group;
            Declaration {
                group,
                name: stringify!($name),
                kind: <$type as Value>::KIND,
                default: $words,
                about: $about.trim_ascii(),
                variable: format!("FABRICAST_{}", group.full(stringify!($name), '_').to_uppercase()),
                option: stringify!($name).replace('_', "-"),
                form: <$type as Value>::FORM,
                read: |settings, text, origin| {
                    let value = <$type as Value>::read(text)?;
                    let check: fn(&$type) -> Result<(), String> = $check;
                    check(&value)?;
                    settings.$name = Setting { value, origin: Some(origin.to_owned()) };
                    Ok(())
                },
                write: |settings| settings.$name.value.write(),
                json: |settings| settings.$name.value.json(),
                origin: |settings| settings.$name.origin.as_deref(),
            }
        },)*)*]);
    };
}
pub(super) use declare;
