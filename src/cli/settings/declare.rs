//! The macro that declares settings: it creates a structure with a field for each, and the table of
//! all.

/// Subject of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Group {
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
        static TABLE: LazyLock<Vec<Declaration>> = LazyLock::new(|| vec![$($({
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
