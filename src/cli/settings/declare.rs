//! How settings are declared: once, by a macro that makes of it a structure with a field for
//! each, and a table of all.

use super::Settings;
use super::value::ValueForm;

/// What a setting is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// How a process is at its node, and the node among others.
    Node,
    /// What a topic is like that is made.
    Topic,
}

impl Group {
    /// A name of it, told from those of the other one.
    pub(super) fn full(self, name: &str, separator: char) -> String {
        match self {
            Self::Node => name.to_owned(),
            Self::Topic => format!("topic{separator}{name}"),
        }
    }
}

/// What is told of a setting.
#[derive(Debug)]
pub(crate) struct Declaration {
    pub(crate) group: Group,
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    /// What it is if nothing is said.
    pub(crate) default: &'static str,
    pub(crate) about: &'static str,
    /// In the environment.
    pub(crate) variable: String,
    /// On the command line, without the dashes in front.
    pub(crate) option: String,
    pub(crate) form: ValueForm,
    /// Reads it, as who is named there said it.
    pub(super) read: fn(&mut Settings, &str, &str) -> Result<(), String>,
    /// As it would be read.
    pub(crate) write: fn(&Settings) -> String,
    /// For programs.
    pub(crate) json: fn(&Settings) -> serde_json::Value,
    pub(super) origin: fn(&Settings) -> Option<&str>,
}

impl Declaration {
    /// Who said it.
    pub(crate) fn origin<'a>(&self, settings: &'a Settings) -> &'a str {
        (self.origin)(settings).unwrap_or("default")
    }

    /// Did anybody say it?
    pub(crate) fn is_set(&self, settings: &Settings) -> bool {
        (self.origin)(settings).is_some()
    }

    /// As it is called where all have to have different names: `topic.depth`.
    pub(crate) fn full_name(&self) -> String {
        self.group.full(self.name, '.')
    }
}

/// A setting, and who said so.
#[derive(Debug, Clone)]
pub(crate) struct Setting<T> {
    pub(crate) value: T,
    /// Who said it, if anybody did: `option --depth`.
    pub(crate) origin: Option<String>,
}

impl<T> Setting<T> {
    /// Did anybody say it?
    pub(crate) fn is_set(&self) -> bool {
        self.origin.is_some()
    }
}

/// Declares all settings: `name: Type = default, "default, in words", check;`, grouped, each
/// with a line of documentation.
macro_rules! declare {
    ($($group:ident { $(
        #[doc = $about:literal]
        $name:ident: $type:ty = $default:expr, $words:literal, $check:expr;
    )* })*) => {
        /// Every setting, and who said what it is.
        #[derive(Debug, Clone)]
        pub(crate) struct Settings {
            $($(#[doc = $about] pub(crate) $name: Setting<$type>,)*)*
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($($name: Setting { value: $default, origin: None },)*)* }
            }
        }

        /// What is told of each, in order.
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
