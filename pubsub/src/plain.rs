//! Types whose values have the same bytes in every process.

use crate::type_name::without_modules;

/// A type of plain bytes: any bytes of its size are a valid value, and it has no padding.
///
/// Implemented for numbers and arrays. Declare structures with [`plain!`](crate::plain!), which
/// checks them; no `unsafe` is needed.
///
/// # Safety
/// Every pattern of bits is a valid value; there is no padding between or behind its fields; it
/// contains no pointer, reference or descriptor; and its layout is fixed, as `#[repr(C)]` makes it.
#[allow(unsafe_code)]
pub unsafe trait Plain: Copy + Send + Sync + 'static {
    /// Name of the type in topics: programs with another name for their type cannot use the topic
    /// by mistake. By default the name without its modules; 1 to 64 bytes.
    ///
    /// ```
    /// use pubsub::Plain;
    /// mod geometry {
    ///     pubsub::plain! {
    ///         pub struct Pose { pub x: f64, pub y: f64 }
    ///     }
    /// }
    /// assert_eq!(geometry::Pose::type_name(), "Pose");
    /// assert_eq!(<[geometry::Pose; 3]>::type_name(), "[Pose; 3]");
    /// ```
    #[must_use]
    fn type_name() -> String {
        without_modules(std::any::type_name::<Self>())
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(
            // SAFETY: a number has no padding, and any bytes are valid.
            #[allow(unsafe_code)]
            unsafe impl Plain for $number {
                fn type_name() -> String {
                    stringify!($number).to_owned()
                }
            }
        )*
    };
}

numbers!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);

// SAFETY: elements are contiguous, and the size of each is a multiple of its alignment.
#[allow(unsafe_code)]
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {
    fn type_name() -> String {
        format!("[{}; {N}]", T::type_name())
    }
}

/// Declares structures of plain bytes: `#[repr(C)]`, [`Plain`](crate::Plain), and `Copy`. Fails to
/// compile if a field is not plain, or if there would be padding. The name of the structure is the
/// type name in topics.
///
/// ```
/// pubsub::plain! {
///     /// Where a robot is.
///     #[derive(Debug, PartialEq)]
///     pub struct Pose {
///         /// In metres.
///         pub position: [f64; 3],
///         /// In radians.
///         pub heading: f64,
///     }
/// }
/// let pose = Pose { position: [1.0, 2.0, 0.0], heading: 0.5 };
/// assert_eq!(size_of_val(&pose), 32);
/// ```
///
/// Four bytes of padding:
///
/// ```compile_fail
/// pubsub::plain! {
///     struct Padded { number: u32, time: u64 }
/// }
/// ```
///
/// A conditional field would hide padding:
///
/// ```compile_fail
/// pubsub::plain! {
///     struct Conditional { #[cfg(any())] hidden: u32, number: u32, time: u64 }
/// }
/// ```
///
/// Not every byte is a valid `bool`:
///
/// ```compile_fail
/// pubsub::plain! {
///     struct Flag { is_set: bool }
/// }
/// ```
#[macro_export]
macro_rules! plain {
    ($(
        $(#[$of_structure:meta])*
        $seen:vis struct $name:ident {
            $( $(#[$of_field:meta])* $field_seen:vis $field:ident: $type:ty ),* $(,)?
        }
    )*) => {
        $(
            $(#[$of_structure])*
            #[derive(Clone, Copy)]
            #[repr(C)]
            $seen struct $name {
                $( $(#[$of_field])* $field_seen $field: $type, )*
            }

            const _: () = {
                const fn is_plain<T: $crate::Plain>() {}
                // A field that an attribute removes would hide padding.
                $( let _ = ::core::mem::offset_of!($name, $field); )*
                $( is_plain::<$type>(); )*
                assert!(
                    ::core::mem::size_of::<$name>() == 0 $( + ::core::mem::size_of::<$type>() )*,
                    "the structure has padding: order its fields by size, or add padding fields"
                );
            };

            // SAFETY: `repr(C)`; all fields are plain, and there is no padding: both checked above.
            #[allow(unsafe_code)]
            unsafe impl $crate::Plain for $name {
                fn type_name() -> ::std::string::String {
                    ::std::string::String::from(::core::stringify!($name))
                }
            }
        )*
    };
}
