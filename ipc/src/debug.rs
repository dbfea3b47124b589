//! `Debug` of errors.

/// Implements `Debug` of an error enum: the text of `Display`, because a program whose `main`
/// returns the error shows this form; with `{:#?}`, the variant and its fields. Tuple fields
/// are named in parentheses.
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
