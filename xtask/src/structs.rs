//! Fields of structs.

use syn::visit::{self, Visit};
use syn::{ItemStruct, Visibility};

/// A struct with named or numbered fields.
pub(crate) struct Struct {
    pub(crate) name: String,
    pub(crate) line: usize,
    pub(crate) fields: usize,
    /// Number of the fields that are open to other files of the crate, but not to other crates:
    /// `pub(crate)`, `pub(super)`, `pub(in …)`.
    pub(crate) open_fields: usize,
}

/// Returns the structs of a file.
pub(crate) fn structs(file: &syn::File) -> Vec<Struct> {
    let mut structs = Structs::default();
    structs.visit_file(file);
    structs.found
}

#[derive(Default)]
struct Structs {
    found: Vec<Struct>,
}

impl<'ast> Visit<'ast> for Structs {
    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        let open =
            item.fields.iter().filter(|field| matches!(field.vis, Visibility::Restricted(_)));
        self.found.push(Struct {
            name: item.ident.to_string(),
            line: item.ident.span().start().line,
            fields: item.fields.len(),
            open_fields: open.count(),
        });
        visit::visit_item_struct(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_restricted_fields_are_open() {
        let file = syn::parse_quote! {
            struct Queue {
                pub length: usize,
                pub(crate) entries: [u8; 4],
                pub(in crate::ring) head: Vec<(u8, u8)>,
                tail: usize,
            }
            pub struct Offset(pub(super) u64, u64);
            struct Empty;
        };
        let found: Vec<_> = structs(&file)
            .iter()
            .map(|one| format!("{} {} {}", one.name, one.fields, one.open_fields))
            .collect();
        assert_eq!(found, ["Queue 4 2", "Offset 2 1", "Empty 0 0"]);
    }
}
