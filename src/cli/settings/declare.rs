//! How settings are declared: once, by a macro that makes of it a structure with a field for
//! each, and a table of all.

use super::value::{Form, Value};

/// What a setting is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// How a process is at its node, and the node among others.
    Node,
    /// What a topic is like that is made.
    Topic,
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
    pub(crate) form: Form,
}

impl Declaration {
    pub(super) fn new<T: Value>(
        group: Group,
        name: &'static str,
        default: &'static str,
        about: &'static str,
    ) -> Self {
        let mut declaration = Self {
            group,
            name,
            kind: T::KIND,
            default,
            about: about.trim(),
            variable: String::new(),
            option: name.replace('_', "-"),
            form: T::FORM,
        };
        let name = declaration.full_name().replace('.', "_").to_uppercase();
        declaration.variable = format!("FABRICAST_{name}");
        declaration
    }

    /// As it is called where all have to have different names: `topic.depth`.
    pub(crate) fn full_name(&self) -> String {
        match self.group {
            Group::Node => self.name.to_owned(),
            Group::Topic => format!("topic.{}", self.name),
        }
    }
}

/// A setting, and who said so.
#[derive(Debug, Clone)]
pub(crate) struct Given<T> {
    pub(crate) value: T,
    /// Who said it, if anybody did: `option --depth`.
    pub(crate) origin: Option<String>,
    pub(super) check: fn(&T) -> Result<(), String>,
}

/// A setting of any type.
pub(crate) trait Entry {
    fn read(&mut self, text: &str, origin: &str) -> Result<(), String>;
    fn write(&self) -> String;
    fn origin(&self) -> &str;
    /// Did anybody say it?
    fn is_given(&self) -> bool;
}

impl<T: Value> Entry for Given<T> {
    fn read(&mut self, text: &str, origin: &str) -> Result<(), String> {
        let value = T::read(text)?;
        (self.check)(&value)?;
        (self.value, self.origin) = (value, Some(origin.to_owned()));
        Ok(())
    }

    fn write(&self) -> String {
        self.value.write()
    }

    fn origin(&self) -> &str {
        self.origin.as_deref().unwrap_or("default")
    }

    fn is_given(&self) -> bool {
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
            $($(#[doc = $about] pub(crate) $name: Given<$type>,)*)*
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($($name: Given { value: $default, origin: None, check: $check },)*)* }
            }
        }

        /// What is told of each, in the order of [`Settings::entries`].
        pub(crate) static TABLE: LazyLock<Vec<Declaration>> = LazyLock::new(|| vec![
            $($(Declaration::new::<$type>(Group::$group, stringify!($name), $words, $about),)*)*
        ]);

        impl Settings {
            /// In the order of [`TABLE`].
            pub(crate) fn entries(&self) -> Vec<&dyn Entry> {
                vec![$($(&self.$name,)*)*]
            }

            pub(super) fn entries_mut(&mut self) -> Vec<&mut dyn Entry> {
                vec![$($(&mut self.$name,)*)*]
            }
        }
    };
}
pub(super) use declare;
