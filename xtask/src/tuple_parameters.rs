//! Parameters of functions that are tuples: their parts have no names where the function is called.

use syn::visit::{self, Visit};
use syn::{FnArg, Signature, Type};

/// A function with such a parameter.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) line: usize,
}

/// Returns the functions of a file with a parameter that is a tuple, or a reference to one.
pub(crate) fn functions(file: &syn::File) -> Vec<Function> {
    let mut functions = Functions::default();
    functions.visit_file(file);
    functions.found
}

#[derive(Default)]
struct Functions {
    found: Vec<Function>,
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_signature(&mut self, signature: &'ast Signature) {
        let is_tuple =
            |parameter: &FnArg| matches!(parameter, FnArg::Typed(typed) if is_tuple(&typed.ty));
        if signature.inputs.iter().any(is_tuple) {
            self.found.push(Function {
                name: signature.ident.to_string(),
                line: signature.ident.span().start().line,
            });
        }
        visit::visit_signature(self, signature);
    }
}

fn is_tuple(parameter: &Type) -> bool {
    match parameter {
        Type::Tuple(tuple) => tuple.elems.len() > 1,
        Type::Reference(reference) => is_tuple(&reference.elem),
        Type::Paren(inner) => is_tuple(&inner.elem),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuples_and_references_to_them_count() {
        let file = syn::parse_quote! {
            fn pair(range: (u64, u64)) {}
            trait Take {
                fn reference(&self, range: &mut (u64, u64));
            }
            fn unit(nothing: (), one: (u64,), list: &[(u64, u64)]) -> (u64, u64) {
                list.iter().map(|(from, to): &(u64, u64)| from + to);
            }
        };
        let found: Vec<_> = functions(&file).into_iter().map(|one| one.name).collect();
        assert_eq!(found, ["pair", "reference"]);
    }
}
