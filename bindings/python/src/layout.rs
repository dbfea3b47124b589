//! Shape and strides of an array.

use crate::data_type::DataType;
use crate::structured::Structured;

/// Maximum number of dimensions.
pub(crate) const MAX_DIMENSIONS: usize = 16;
/// Begin of the header of an array in the metadata of a message, with its version.
const MAGIC: [u8; 3] = *b"FA\x01";
/// Bytes of the header before the extents.
const FIXED: usize = 8;

/// Shape and strides, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    shape: Vec<u64>,
    strides: Vec<i64>,
}

impl Layout {
    /// In C order without gaps. None for too many dimensions or elements.
    pub(crate) fn contiguous(shape: Vec<u64>) -> Option<Self> {
        let mut strides = vec![0; shape.len()];
        let mut next: u64 = 1;
        for (stride, extent) in strides.iter_mut().zip(&shape).rev() {
            *stride = i64::try_from(next).ok()?;
            next = next.checked_mul((*extent).max(1))?;
        }
        (shape.len() <= MAX_DIMENSIONS && i64::try_from(next).is_ok())
            .then_some(Self { shape, strides })
    }

    /// With these strides. None for too many dimensions or elements, or if the numbers differ.
    pub(crate) fn strided(shape: Vec<u64>, strides: Vec<i64>) -> Option<Self> {
        let contiguous = Self::contiguous(shape)?;
        if strides.len() != contiguous.shape.len() {
            return None;
        }
        let layout = Self { shape: contiguous.shape, strides };
        layout.range().map(|_| layout)
    }

    /// Without elements.
    pub(crate) fn empty() -> Self {
        Self { shape: vec![0], strides: vec![1] }
    }

    pub(crate) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// In elements.
    pub(crate) fn strides(&self) -> &[i64] {
        &self.strides
    }

    /// Number of elements.
    pub(crate) fn elements(&self) -> u64 {
        // Checked when it was made.
        self.shape.iter().product()
    }

    /// Is it in C order without gaps? Strides of extents of one do not matter.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut next: i64 = 1;
        for (extent, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *extent > 1 && *stride != next {
                return self.elements() == 0;
            }
            next = next.saturating_mul((*extent).max(1) as i64);
        }
        true
    }

    /// The lowest and the highest element, from the first on; None beyond all addresses. Both 0
    /// without elements.
    fn range(&self) -> Option<(i64, i64)> {
        let (mut low, mut high): (i64, i64) = (0, 0);
        if self.shape.contains(&0) {
            return Some((0, 0));
        }
        for (extent, stride) in self.shape.iter().zip(&self.strides) {
            let last = i64::try_from(*extent - 1).ok()?.checked_mul(*stride)?;
            let end = if last < 0 { &mut low } else { &mut high };
            *end = end.checked_add(last)?;
        }
        Some((low, high))
    }

    /// The bytes that it reaches, from the first element on: offset and length. None beyond all
    /// addresses, or for elements that share bytes in an array with gaps.
    pub(crate) fn extent(&self, data_type: DataType) -> Option<(i64, u64)> {
        // Also the length without gaps: with strides of 0 it is more than the bytes reached.
        let length = data_type.bytes(self.elements())?;
        if self.is_contiguous() {
            return Some((0, length));
        }
        let item = i64::try_from(data_type.item_size()?).ok()?;
        let (low, high) = self.range()?;
        let (first, end) = (low.checked_mul(item)?, high.checked_add(1)?.checked_mul(item)?);
        Some((first, u64::try_from(end.checked_sub(first)?).ok()?))
    }

    /// The header by which a reader of a message knows type and shape. The message is contiguous.
    /// For records it ends with their description, whose length is in the place of the lanes.
    pub(crate) fn header(&self, data_type: DataType) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let (code, bits, lanes) = data_type.codes();
        let description = data_type.structured().map_or("", Structured::text);
        let lanes = if description.is_empty() { lanes } else { description.len() as u16 };
        bytes.extend([code, bits, self.shape.len() as u8]);
        bytes.extend(lanes.to_le_bytes());
        bytes.extend(self.shape.iter().flat_map(|extent| extent.to_le_bytes()));
        bytes.extend(description.as_bytes());
        bytes
    }

    /// Type and shape of a message of this length from its metadata, and the metadata behind the
    /// header; None if there is no header, or it does not describe such a message.
    pub(crate) fn from_header(metadata: &[u8], length: u64) -> Option<(DataType, Self, &[u8])> {
        let rest = metadata.strip_prefix(&MAGIC)?;
        let [code, bits, dimensions, lanes @ ..] =
            *rest.first_chunk::<{ FIXED - MAGIC.len() }>()?;
        let lanes = u16::from_le_bytes(lanes);
        let rest = &rest[FIXED - MAGIC.len()..];
        let (extents, rest) = rest.split_at_checked(usize::from(dimensions) * 8)?;
        let (extents, _) = extents.as_chunks::<8>();
        let (data_type, rest) = match DataType::is_of_records(code) {
            true => {
                let (description, rest) = rest.split_at_checked(usize::from(lanes))?;
                (DataType::received_records(std::str::from_utf8(description).ok()?)?, rest)
            }
            false => (DataType::from_codes(code, bits, lanes)?, rest),
        };
        let shape = extents.iter().map(|extent| u64::from_le_bytes(*extent)).collect();
        let layout = Self::contiguous(shape)?;
        (data_type.bytes(layout.elements()) == Some(length)).then_some((data_type, layout, rest))
    }

    /// Type and shape as text: `float32[3,480,640]`.
    pub(crate) fn type_name(&self, data_type: DataType) -> String {
        let shape: Vec<_> = self.shape.iter().map(u64::to_string).collect();
        format!("{data_type}[{}]", shape.join(","))
    }

    /// Offsets in elements of the rows that are contiguous, each of the returned length. For copies
    /// of strided arrays.
    pub(crate) fn rows(&self) -> (u64, impl Iterator<Item = i64> + '_) {
        let mut length: u64 = 1;
        let mut outer = self.shape.len();
        while outer > 0 {
            let (extent, stride) = (self.shape[outer - 1], self.strides[outer - 1]);
            if extent != 1 && stride != length as i64 {
                break;
            }
            length *= extent;
            outer -= 1;
        }
        let count: u64 = self.shape[..outer].iter().product();
        let offsets = (0..count).map(move |mut number| {
            let mut offset = 0;
            for dimension in (0..outer).rev() {
                offset += (number % self.shape[dimension]) as i64 * self.strides[dimension];
                number /= self.shape[dimension];
            }
            offset
        });
        (length, offsets)
    }
}
