//! Description of shared bytes: element type, shape, strides.

use crate::error::{Error, ErrorKind, Result};

/// Maximum number of dimensions.
pub const MAX_DIMENSIONS: usize = 16;

macro_rules! element_types {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $size:literal;)*) => {
        /// The type of an element.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ElementType {
            $($(#[$doc])* $name,)*
        }

        impl ElementType {
            pub(crate) fn code(self) -> u8 {
                match self { $(Self::$name => $code,)* }
            }

            pub(crate) fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }

            /// Size in bytes.
            #[must_use]
            pub fn size(self) -> u64 {
                match self { $(Self::$name => $size,)* }
            }
        }
    };
}

// Codes are part of the format and are never reused.
element_types! {
    /// An unsigned byte, or opaque data.
    U8 = 1, 1;
    /// 8 bits, signed.
    I8 = 2, 1;
    /// 16 bits.
    U16 = 3, 2;
    /// 16 bits, signed.
    I16 = 4, 2;
    /// 32 bits.
    U32 = 5, 4;
    /// 32 bits, signed.
    I32 = 6, 4;
    /// 64 bits.
    U64 = 7, 8;
    /// 64 bits, signed.
    I64 = 8, 8;
    /// 0 or 1, in a byte.
    Bool = 9, 1;
    /// Half precision.
    F16 = 10, 2;
    /// The upper half of single precision.
    Bf16 = 11, 2;
    /// Single precision.
    F32 = 12, 4;
    /// Double precision.
    F64 = 13, 8;
    /// 8 bits, 4 of exponent.
    F8E4M3 = 14, 1;
    /// 8 bits, 5 of exponent.
    F8E5M2 = 15, 1;
    /// Two of single precision.
    C64 = 16, 8;
    /// Two of double precision.
    C128 = 17, 16;
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
        let size = i128::from(self.element.size());
        let mut first = i128::from(self.byte_offset);
        let mut last = first;
        for (length, stride) in self.shape.iter().zip(&self.strides) {
            // At most 16 times a product of two 64-bit numbers and 16: no overflow.
            let reach = i128::from(*length - 1).checked_mul(i128::from(*stride))?;
            let reach = reach.checked_mul(size)?;
            match reach < 0 {
                true => first = first.checked_add(reach)?,
                false => last = last.checked_add(reach)?,
            }
        }
        Some((u64::try_from(first).ok()?, u64::try_from(last.checked_add(size)?).ok()?))
    }

    /// Fails if the tensor exceeds memory of `length` bytes.
    pub(crate) fn check(&self, operation: &'static str, length: u64) -> Result<()> {
        match self.extent() {
            Some((_, end)) if end <= length => Ok(()),
            Some((first, end)) => {
                let detail = format!("the tensor covers bytes {first} to {end} of {length}");
                Err(Error::new(operation, ErrorKind::OutOfBounds, detail))
            }
            None => {
                let detail = format!("shape {:?} with strides {:?}", self.shape, self.strides);
                Err(Error::new(operation, ErrorKind::OutOfBounds, detail))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_one_to_one() {
        let all: Vec<_> = (0..=255).filter_map(ElementType::from_code).collect();
        assert_eq!(all.len(), 17);
        for element in all {
            assert_eq!(ElementType::from_code(element.code()), Some(element));
        }
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
