//! The description of shared bytes.

use transfer::{ElementType, MAX_DIMENSIONS, Tensor};

use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Array, WithDefaults};

/// `fabricast_tensor`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawTensor<'a> {
    size: usize,
    type_code: u8,
    bits: u8,
    lanes: u16,
    dimensions: u32,
    shape: Array<'a, u64>,
    strides: Array<'a, i64>,
    byte_offset: u64,
}

impl WithDefaults for RawTensor<'_> {
    fn defaults(size: usize) -> Self {
        let (type_code, bits, lanes) = ElementType::U8.codes();
        Self { size, type_code, bits, lanes, ..Self::default() }
    }
}

impl<'a> RawTensor<'a> {
    /// Shape and strides are those of the tensor.
    pub(crate) fn of(size: usize, tensor: &'a Tensor) -> Self {
        let (type_code, bits, lanes) = tensor.element.codes();
        Self {
            size,
            type_code,
            bits,
            lanes,
            dimensions: tensor.shape.len() as u32,
            shape: Array::of(&tensor.shape),
            strides: Array::of(&tensor.strides),
            byte_offset: tensor.byte_offset,
        }
    }

    /// The caller checks that the memory has its bytes.
    pub(crate) fn to_tensor(self, operation: Operation) -> Result<Tensor> {
        let Self { type_code, bits, lanes, byte_offset, .. } = self;
        let Some(element) = ElementType::new(type_code, bits, lanes) else {
            let detail = format!(
                "elements of type code {type_code} with {bits} bits and {lanes} lanes are unknown \
                 to DLPack"
            );
            return Err(Failure::invalid(operation, detail));
        };
        let dimensions = self.dimensions as usize;
        if dimensions > MAX_DIMENSIONS {
            let detail = format!("{dimensions} dimensions, {MAX_DIMENSIONS} is the maximum");
            return Err(Failure::invalid(operation, detail));
        }
        let shape = self.shape.get(operation, "shape", dimensions)?;
        let mut tensor = Tensor { byte_offset, ..Tensor::contiguous(element, shape) };
        if !self.strides.is_null() {
            tensor.strides = self.strides.get(operation, "strides", dimensions)?.to_vec();
        }
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::ffi::Layout as _;
    use crate::status::Status;

    /// `tests/programs/layout.c` has the same numbers.
    #[test]
    fn tensor_has_the_layout_of_c() {
        assert_eq!(size_of::<RawTensor<'_>>(), 40);
        assert_eq!(RawTensor::MIN_SIZE, size_of::<RawTensor<'_>>());
        assert_eq!(offset_of!(RawTensor<'_>, type_code), 8);
        assert_eq!(offset_of!(RawTensor<'_>, lanes), 10);
        assert_eq!(offset_of!(RawTensor<'_>, dimensions), 12);
        assert_eq!(offset_of!(RawTensor<'_>, strides), 24);
        assert_eq!(offset_of!(RawTensor<'_>, byte_offset), 32);
    }

    fn defaults() -> RawTensor<'static> {
        RawTensor::defaults(size_of::<RawTensor<'_>>())
    }

    #[test]
    fn default_tensor_is_one_byte() {
        let tensor = defaults().to_tensor(c"test").unwrap();
        assert_eq!(tensor, Tensor::contiguous(ElementType::U8, &[]));
        assert_eq!(tensor.extent(), Some((0, 1)));
    }

    #[test]
    fn tensors_survive_conversion() {
        let rows = Tensor::contiguous(ElementType::F32, &[3, 4]);
        let backwards = Tensor { strides: vec![-4, 1], byte_offset: 32, ..rows.clone() };
        let packed = Tensor::contiguous(ElementType::new(17, 4, 2).unwrap(), &[5]);
        for tensor in [rows, backwards, packed, Tensor::contiguous(ElementType::BF16, &[])] {
            assert_eq!(RawTensor::of(40, &tensor).to_tensor(c"test").unwrap(), tensor);
        }
    }

    #[test]
    fn tensor_without_strides_has_no_gaps() {
        let raw = RawTensor { dimensions: 3, shape: Array::of(&[2, 3, 4]), ..defaults() };
        assert_eq!(raw.to_tensor(c"test").unwrap().strides, [12, 4, 1]);
        let huge = RawTensor { shape: Array::of(&[u64::MAX; 3]), ..raw };
        assert_eq!(huge.to_tensor(c"test").unwrap().extent(), None);
    }

    #[test]
    fn invalid_tensors_are_errors() {
        let shape = Array::of(&[1; 17]);
        let refused = [
            RawTensor { type_code: 18, ..defaults() },
            RawTensor { bits: 0, ..defaults() },
            RawTensor { bits: 129, ..defaults() },
            RawTensor { lanes: 0, ..defaults() },
            RawTensor { dimensions: 1, ..defaults() },
            RawTensor { dimensions: 1, strides: Array::of(&[1]), ..defaults() },
            RawTensor { dimensions: 17, shape, ..defaults() },
            RawTensor { dimensions: u32::MAX, shape, ..defaults() },
        ];
        for raw in refused {
            let failure = raw.to_tensor(c"test").unwrap_err();
            assert_eq!(failure.status, Status::InvalidArgument, "{raw:?}");
        }
    }
}
