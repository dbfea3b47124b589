//! Rust types of elements.

use reduction::DataType;

/// A Rust type whose elements collective operations move and reduce.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The type of the element.
    const DATA_TYPE: DataType;
}

mod sealed {
    pub trait Sealed {}
}

/// A number of half precision, as its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The upper half of a number of single precision, as its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(transparent)]
pub struct Bf16(pub u16);

macro_rules! elements {
    ($($type:ty => $data_type:ident,)*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DATA_TYPE: DataType = DataType::$data_type;
        }
    )*};
}

elements! {
    u8 => U8,
    i8 => I8,
    u16 => U16,
    i16 => I16,
    u32 => U32,
    i32 => I32,
    u64 => U64,
    i64 => I64,
    F16 => F16,
    Bf16 => Bf16,
    f32 => F32,
    f64 => F64,
}
