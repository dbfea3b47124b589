//! The settings as a table for the documentation.

use super::TABLE;

/// As it stands in docs/operating.md.
pub(crate) fn markdown() -> String {
    let mut text = String::from(
        "| in the file | option | in the environment | what it is | if nothing is said |\n\
         |---|---|---|---|---|\n",
    );
    for declaration in TABLE.iter() {
        let kind = declaration.kind.replace('|', " or ");
        let option = match declaration.alone {
            Some(_) => format!("`--{}`", declaration.option),
            None => format!("`--{}` {kind}", declaration.option),
        };
        text.push_str(&format!(
            "| `{}` | {option} | `{}` | {} | {} |\n",
            declaration.full_name(),
            declaration.variable,
            declaration.about,
            declaration.default
        ));
    }
    text
}
