//! `Debug` of errors.

/// Implements `Debug` of an enum of errors: the text of `Display`, since that is what a program
/// shows whose `main` returns it; with `{:#?}`, the variant and its fields. A field without a name
/// is given one in round brackets.
macro_rules! debug_for_people {
    ($error:ident {
        $( $variant:ident $( { $($field:ident),* } )? $( ($only:ident) )? ),* $(,)?
    }) => {
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                if !f.alternate() {
                    return ::std::fmt::Display::fmt(self, f);
                }
                match self {
                    $( Self::$variant $( { $($field),* } )? $( ($only) )? => f
                        .debug_struct(stringify!($variant))
                        $( $(.field(stringify!($field), $field))* )?
                        $( .field(stringify!($only), $only) )?
                        .finish(), )*
                }
            }
        }
    };
}

pub(crate) use debug_for_people;
