//! `#[derive(Plain)]`, see `ipc::Plain`.

use proc_macro::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Fields, parse_macro_input};

/// Marks a struct as fit to be shared between processes, if it is: `repr(C)` or
/// `repr(transparent)`, made of nothing but values that are, and without padding.
#[proc_macro_derive(Plain)]
pub fn derive_plain(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(input: &DeriveInput) -> Result<proc_macro2::TokenStream, Error> {
    let Data::Struct(data) = &input.data else {
        // Not every number is a variant, and not every byte of a union is set.
        return Err(Error::new(
            input.span(),
            "only a struct can be Plain: any bytes are a value of it",
        ));
    };
    if !input.generics.params.is_empty() {
        return Err(Error::new(
            input.generics.span(),
            "a Plain struct has no parameters: its layout is the same for everybody",
        ));
    }
    if !has_fixed_layout(input)? {
        return Err(Error::new(
            input.span(),
            "a Plain struct is `#[repr(C)]` or `#[repr(transparent)]`: other layouts differ from one build to the next",
        ));
    }
    let name = &input.ident;
    let types: Vec<_> = match &data.fields {
        Fields::Unit => Vec::new(),
        fields => fields.iter().map(|field| &field.ty).collect(),
    };
    let checks = types.iter().map(|ty| {
        quote_spanned! { ty.span() =>
            const _: () = {
                const fn is_plain<T: ::ipc::Plain>() {}
                is_plain::<#ty>();
            };
        }
    });
    Ok(quote! {
        #(#checks)*
        const _: () = assert!(
            ::core::mem::size_of::<#name>() == 0 #(+ ::core::mem::size_of::<#types>())*,
            "a Plain struct has no padding: name the gaps, as fields that are set"
        );
        #[allow(unsafe_code)]
        // SAFETY: checked above: a fixed layout, of plain fields, without padding.
        unsafe impl ::ipc::Plain for #name {}
    })
}

fn has_fixed_layout(input: &DeriveInput) -> Result<bool, Error> {
    let mut is_fixed = false;
    for attribute in input.attrs.iter().filter(|attribute| attribute.path().is_ident("repr")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("packed") {
                return Err(meta.error("a Plain struct is not packed: its fields are referred to"));
            }
            is_fixed |= meta.path.is_ident("C") || meta.path.is_ident("transparent");
            // What else there is has a value in parentheses at most.
            if meta.input.peek(syn::token::Paren) {
                let content;
                syn::parenthesized!(content in meta.input);
                content.parse::<proc_macro2::TokenStream>()?;
            }
            Ok(())
        })?;
    }
    Ok(is_fixed)
}
