//! Description of shared bytes: element type, shape, strides.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};

/// Maximum number of dimensions.
pub const MAX_DIMENSIONS: usize = 16;

/// The type of an element, with the codes of DLPack.
///
/// ```
/// use transfer::ElementType;
/// assert_eq!(ElementType::BF16.bits(), 16);
/// // Two numbers of 4 bits in each byte.
/// let packed = ElementType::new(17, 4, 2).expect("a type of DLPack");
/// assert_eq!((packed.bits(), packed.codes()), (8, (17, 4, 2)));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ElementType {
    code: u8,
    bits: u8,
    lanes: u16,
}

macro_rules! element_types {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $bits:literal;)*) => {
        impl ElementType {
            $($(#[$doc])* pub const $name: Self = Self { code: $code, bits: $bits, lanes: 1 };)*

            fn name(self) -> Option<&'static str> {
                match (self.code, self.bits) {
                    $(($code, $bits) => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

element_types! {
    /// An unsigned byte, or opaque data.
    U8 = 1, 8;
    /// 8 bits, signed.
    I8 = 0, 8;
    /// 16 bits.
    U16 = 1, 16;
    /// 16 bits, signed.
    I16 = 0, 16;
    /// 32 bits.
    U32 = 1, 32;
    /// 32 bits, signed.
    I32 = 0, 32;
    /// 64 bits.
    U64 = 1, 64;
    /// 64 bits, signed.
    I64 = 0, 64;
    /// 0 or 1, in a byte.
    BOOL = 6, 8;
    /// Half precision.
    F16 = 2, 16;
    /// The upper half of single precision.
    BF16 = 4, 16;
    /// Single precision.
    F32 = 2, 32;
    /// Double precision.
    F64 = 2, 64;
    /// 8 bits, 4 of exponent, without infinities (`float8_e4m3fn`).
    F8_E4M3 = 10, 8;
    /// 8 bits, 5 of exponent.
    F8_E5M2 = 12, 8;
    /// Two of single precision.
    C64 = 5, 64;
    /// Two of double precision.
    C128 = 5, 128;
    /// Bytes whose meaning only the program knows.
    OPAQUE = 3, 8;
}

/// Highest code that DLPack defines.
const MAX_CODE: u8 = 17;
const MAX_LANES: u16 = 16;

impl ElementType {
    /// By the code of DLPack, the bits of a number, and the numbers in an element. None for what
    /// DLPack does not define.
    #[must_use]
    pub fn new(code: u8, bits: u8, lanes: u16) -> Option<Self> {
        let is_known =
            code <= MAX_CODE && (1..=128).contains(&bits) && (1..=MAX_LANES).contains(&lanes);
        is_known.then_some(Self { code, bits, lanes })
    }

    /// The code of DLPack, the bits of a number, and the numbers in an element.
    #[must_use]
    pub fn codes(self) -> (u8, u8, u16) {
        (self.code, self.bits, self.lanes)
    }

    /// Bits of an element.
    #[must_use]
    pub fn bits(self) -> u64 {
        u64::from(self.bits) * u64::from(self.lanes)
    }
}

impl fmt::Debug for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, bits, lanes } = self;
        match self.name() {
            Some(name) if *lanes == 1 => f.write_str(name),
            _ => write!(f, "ElementType(code {code}, {bits} bits, {lanes} lanes)"),
        }
    }
}

/// Layout of the bytes: element type, the offset of the first element, shape and strides.
///
/// ```
/// use transfer::{ElementType, Tensor};
/// let rows = Tensor::contiguous(ElementType::F32, &[3, 4]);
/// assert_eq!(rows.strides, [4, 1]);
/// assert_eq!(rows.extent(), Some((0, 48)));
/// // Transposed, and without its first row.
/// let turned = Tensor { shape: vec![4, 2], strides: vec![1, 4], byte_offset: 16, ..rows };
/// assert_eq!(turned.extent(), Some((16, 48)));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// The type of an element.
    pub element: ElementType,
    /// Elements in each dimension.
    pub shape: Vec<u64>,
    /// Distance between neighbours in each dimension, in elements; may be negative or 0.
    pub strides: Vec<i64>,
    /// Offset in the memory of the element with all indices 0, in bytes.
    pub byte_offset: u64,
}

impl Tensor {
    /// A tensor without gaps in row-major order.
    #[must_use]
    pub fn contiguous(element: ElementType, shape: &[u64]) -> Self {
        let mut strides = vec![1_i64; shape.len()];
        for at in (1..shape.len()).rev() {
            let length = i64::try_from(shape[at]).unwrap_or(i64::MAX);
            strides[at - 1] = strides[at].saturating_mul(length.max(1));
        }
        Self { element, shape: shape.to_vec(), strides, byte_offset: 0 }
    }

    /// A tensor of bytes.
    #[must_use]
    pub fn bytes(length: u64) -> Self {
        Self::contiguous(ElementType::U8, &[length])
    }

    /// The number of elements; None if it exceeds 64 bits.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        // A length of 0 makes the tensor empty, whatever the other dimensions claim.
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().try_fold(1_u64, |product, length| product.checked_mul(*length))
    }

    /// The range of bytes that it covers. None if that exceeds 64 bits, or if shape and strides do
    /// not match.
    #[must_use]
    pub fn extent(&self) -> Option<(u64, u64)> {
        if self.shape.len() != self.strides.len() || self.shape.len() > MAX_DIMENSIONS {
            return None;
        }
        if self.elements()? == 0 {
            return Some((self.byte_offset, self.byte_offset));
        }
        let bits = i128::from(self.element.bits());
        let mut first = i128::from(self.byte_offset) * 8;
        let mut last = first;
        for (length, stride) in self.shape.iter().zip(&self.strides) {
            // At most 16 times a product of two 64-bit numbers and 2048: no overflow.
            let reach = i128::from(*length - 1).checked_mul(i128::from(*stride))?;
            let reach = reach.checked_mul(bits)?;
            match reach < 0 {
                true => first = first.checked_add(reach)?,
                false => last = last.checked_add(reach)?,
            }
        }
        // Whole bytes.
        let end = last.checked_add(bits)?.checked_add(7)?;
        Some((u64::try_from(first.div_euclid(8)).ok()?, u64::try_from(end.div_euclid(8)).ok()?))
    }

    /// Fails if the tensor exceeds memory of `length` bytes.
    pub(crate) fn check(&self, operation: &'static str, length: u64) -> Result<()> {
        let detail = match self.extent() {
            Some((_, end)) if end <= length => return Ok(()),
            Some((first, end)) => format!("the tensor covers bytes {first} to {end} of {length}"),
            None => format!("shape {:?} with strides {:?}", self.shape, self.strides),
        };
        Err(Error::new(operation, ErrorKind::OutOfBounds, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_elements_cover_whole_bytes() {
        let tensor = |lanes, shape: &[u64]| {
            let element = ElementType::new(17, 4, lanes).unwrap();
            Tensor::contiguous(element, shape).extent()
        };
        assert_eq!(tensor(1, &[3]), Some((0, 2)));
        assert_eq!(tensor(2, &[3]), Some((0, 3)));
        assert_eq!(ElementType::new(18, 8, 1), None);
        assert_eq!(ElementType::new(2, 0, 1), None);
        assert_eq!(ElementType::new(2, 32, 0), None);
        assert_eq!(format!("{:?}", ElementType::BF16), "BF16");
    }

    #[test]
    fn extent_covers_all_elements() {
        let tensor = |shape: &[u64], strides: &[i64], byte_offset| Tensor {
            element: ElementType::F32,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            byte_offset,
        };
        assert_eq!(tensor(&[], &[], 8).extent(), Some((8, 12)), "one number");
        assert_eq!(tensor(&[4], &[-1], 12).extent(), Some((0, 16)), "backwards");
        assert_eq!(tensor(&[4], &[-1], 8).extent(), None, "before the beginning");
        assert_eq!(tensor(&[5, 3], &[0, 1], 0).extent(), Some((0, 12)), "one row, five times");
        assert_eq!(tensor(&[u64::MAX, 0], &[7, 7], 4).extent(), Some((4, 4)), "nothing");
        assert_eq!(tensor(&[2], &[1, 1], 0).extent(), None);
        assert_eq!(tensor(&[u64::MAX, 2], &[1, 1], 0).extent(), None);
        assert_eq!(tensor(&[u64::MAX], &[i64::MAX], 0).extent(), None);
        assert_eq!(tensor(&[1; 17], &[1; 17], 0).extent(), None);
        assert!(tensor(&[4], &[1], 0).check("test", 16).is_ok());
        let error = tensor(&[4], &[1], 0).check("test", 15).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
}
