//! What is production code: the one definition that all counts and checks use.
//!
//! A file has the first of these categories that applies:
//!
//! | category | files |
//! |---|---|
//! | tools | `xtask/` |
//! | generated | a folder `bindings` in `fabric/sys/` |
//! | tests | a folder of [`TEST_FOLDERS`] or `*_tests`, a file of [`TEST_FILES`] or `*_test(s).rs` |
//! | benchmarks | a folder of [`BENCHMARK_FOLDERS`] |
//! | examples | a folder `examples` |
//! | production | all others |
//!
//! In Rust files of the last three, an item, field, variant, statement or arm is test code if it
//! has the attribute `#[test]`, or one `#[cfg(…)]` that only builds for tests satisfy: one that is
//! false wherever all of [`TEST_FLAGS`] and [`TEST_FEATURES`] are off. All that is within it is
//! test code, and so is each file that is only reached through the declaration of such a module.

use std::collections::BTreeSet;
use std::mem;

use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit_mut::VisitMut;
use syn::{Attribute, Expr, Lit, Meta, Token};

const TEST_FOLDERS: [&str; 7] =
    ["tests", "fuzz", "fuzzing", "testkit", "models", "crash_points", "crashing"];
const TEST_FILES: [&str; 6] = [
    "test.rs",
    "tests.rs",
    "testing.rs",
    "simulation.rs",
    "simulated_ends.rs",
    "fault_injection.rs",
];
const BENCHMARK_FOLDERS: [&str; 3] = ["bench", "benches", "exchange"];
const TEST_FLAGS: [&str; 4] = ["test", "doctest", "loom", "fuzzing"];
const TEST_FEATURES: [&str; 3] = ["fuzzing", "crash-test", "fault-injection"];

/// Use of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Category {
    Production,
    Tests,
    Generated,
    Benchmarks,
    Examples,
    Tools,
}

impl Category {
    /// Category that the path of a file gives.
    pub(crate) fn of(path: &str) -> Self {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let within = |folders: &[&str]| folder.split('/').any(|one| folders.contains(&one));
        if path.starts_with("xtask/") {
            Self::Tools
        } else if path.starts_with("fabric/sys/") && within(&["bindings"]) {
            Self::Generated
        } else if within(&TEST_FOLDERS)
            || folder.split('/').any(|one| one.ends_with("_tests"))
            || TEST_FILES.contains(&name)
            || name.ends_with("_tests.rs")
            || name.ends_with("_test.rs")
        {
            Self::Tests
        } else if within(&BENCHMARK_FOLDERS) {
            Self::Benchmarks
        } else if within(&["examples"]) {
            Self::Examples
        } else {
            Self::Production
        }
    }

    /// Finds out whether files of this category are divided into test code and other code.
    pub(crate) fn has_items(self) -> bool {
        matches!(self, Self::Production | Self::Benchmarks | Self::Examples)
    }

    /// Finds out whether the rules for sources hold for this category: the benchmarks are a program
    /// that is shipped.
    pub(crate) fn is_checked(self) -> bool {
        matches!(self, Self::Production | Self::Benchmarks)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Production => "production",
            Self::Tests => "tests",
            Self::Generated => "generated",
            Self::Benchmarks => "benchmarks",
            Self::Examples => "examples",
            Self::Tools => "tools",
        }
    }
}

/// Finds out whether attributes make what has them test code.
pub(crate) fn has_test_attribute(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args::<Meta>().is_ok_and(|predicate| value(&predicate) == Some(false))
        }
        _ => false,
    })
}

/// Removes the test code from a file, and returns the numbers of its lines.
pub(crate) fn remove_tests(file: &mut syn::File) -> BTreeSet<usize> {
    let mut removal = Removal { lines: BTreeSet::new(), is_test: false };
    removal.visit_file_mut(file);
    removal.lines
}

/// Value of a predicate of `cfg` in builds that are not for tests; none if it depends on the build.
fn value(predicate: &Meta) -> Option<bool> {
    match predicate {
        Meta::Path(flag) => TEST_FLAGS.iter().any(|test| flag.is_ident(test)).then_some(false),
        Meta::NameValue(pair) => {
            let Expr::Lit(literal) = &pair.value else { return None };
            let Lit::Str(text) = &literal.lit else { return None };
            let is_test =
                pair.path.is_ident("feature") && TEST_FEATURES.contains(&text.value().as_str());
            is_test.then_some(false)
        }
        Meta::List(list) => {
            let parts =
                list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).ok()?;
            let values: Vec<_> = parts.iter().map(value).collect();
            if list.path.is_ident("not") {
                return values.first().copied().flatten().map(|value| !value);
            }
            // One false part makes "all" false, and one true part makes "any" true.
            let decisive = list.path.is_ident("any");
            if values.contains(&Some(decisive)) {
                Some(decisive)
            } else {
                values.iter().all(Option::is_some).then_some(!decisive)
            }
        }
    }
}

/// Removal of the test code from a syntax tree.
struct Removal {
    lines: BTreeSet<usize>,
    /// The node that is being visited has an attribute of tests.
    is_test: bool,
}

impl Removal {
    /// Visits a node and returns `true` if it is kept; remembers the lines of one that is not.
    fn keeps<Node: Spanned>(&mut self, node: &mut Node, visit: fn(&mut Self, &mut Node)) -> bool {
        let is_around_test = mem::take(&mut self.is_test);
        visit(self, node);
        let is_test = mem::replace(&mut self.is_test, is_around_test);
        if is_test {
            let span = node.span();
            self.lines.extend(span.start().line..=span.end().line);
        }
        !is_test
    }
}

// Each method visits all parts of a node that may be, or contain, test code.
impl VisitMut for Removal {
    fn visit_attributes_mut(&mut self, attributes: &mut Vec<Attribute>) {
        self.is_test |= has_test_attribute(attributes);
    }

    fn visit_type_mut(&mut self, _: &mut syn::Type) {}

    fn visit_file_mut(&mut self, file: &mut syn::File) {
        file.items.retain_mut(|item| self.keeps(item, Self::visit_item_mut));
    }

    fn visit_item_mod_mut(&mut self, module: &mut syn::ItemMod) {
        self.visit_attributes_mut(&mut module.attrs);
        if let Some((_, items)) = &mut module.content {
            items.retain_mut(|item| self.keeps(item, Self::visit_item_mut));
        }
    }

    fn visit_item_impl_mut(&mut self, implementation: &mut syn::ItemImpl) {
        self.visit_attributes_mut(&mut implementation.attrs);
        implementation.items.retain_mut(|item| self.keeps(item, Self::visit_impl_item_mut));
    }

    fn visit_item_trait_mut(&mut self, definition: &mut syn::ItemTrait) {
        self.visit_attributes_mut(&mut definition.attrs);
        definition.items.retain_mut(|item| self.keeps(item, Self::visit_trait_item_mut));
    }

    fn visit_item_foreign_mod_mut(&mut self, block: &mut syn::ItemForeignMod) {
        self.visit_attributes_mut(&mut block.attrs);
        block.items.retain_mut(|item| self.keeps(item, Self::visit_foreign_item_mut));
    }

    fn visit_item_enum_mut(&mut self, definition: &mut syn::ItemEnum) {
        self.visit_attributes_mut(&mut definition.attrs);
        definition.variants.retain(|variant| self.keeps(variant, Self::visit_variant_mut));
    }

    fn visit_fields_named_mut(&mut self, fields: &mut syn::FieldsNamed) {
        fields.named.retain(|field| self.keeps(field, Self::visit_field_mut));
    }

    fn visit_fields_unnamed_mut(&mut self, fields: &mut syn::FieldsUnnamed) {
        fields.unnamed.retain(|field| self.keeps(field, Self::visit_field_mut));
    }

    fn visit_signature_mut(&mut self, signature: &mut syn::Signature) {
        signature.inputs.retain(|parameter| self.keeps(parameter, Self::visit_fn_arg_mut));
    }

    fn visit_block_mut(&mut self, block: &mut syn::Block) {
        block.stmts.retain_mut(|statement| self.keeps(statement, Self::visit_stmt_mut));
    }

    fn visit_expr_match_mut(&mut self, expression: &mut syn::ExprMatch) {
        self.visit_attributes_mut(&mut expression.attrs);
        self.visit_expr_mut(&mut expression.expr);
        expression.arms.retain_mut(|arm| self.keeps(arm, Self::visit_arm_mut));
    }

    fn visit_expr_struct_mut(&mut self, expression: &mut syn::ExprStruct) {
        self.visit_attributes_mut(&mut expression.attrs);
        expression.fields.retain(|field| self.keeps(field, Self::visit_field_value_mut));
        if let Some(rest) = &mut expression.rest {
            self.visit_expr_mut(rest);
        }
    }

    fn visit_pat_struct_mut(&mut self, pattern: &mut syn::PatStruct) {
        self.visit_attributes_mut(&mut pattern.attrs);
        pattern.fields.retain(|field| self.keeps(field, Self::visit_field_pat_mut));
    }
}

#[cfg(test)]
#[path = "production_tests.rs"]
mod tests;
