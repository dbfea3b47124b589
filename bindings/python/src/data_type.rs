//! Types of array elements, by the names that NumPy, PyTorch and JAX share.

use std::fmt;

use crate::structured::Structured;

/// Kinds of numbers, with the codes of DLPack.
mod code {
    pub(super) const INT: u8 = 0;
    pub(super) const UINT: u8 = 1;
    pub(super) const FLOAT: u8 = 2;
    pub(super) const BFLOAT: u8 = 4;
    pub(super) const COMPLEX: u8 = 5;
    pub(super) const BOOL: u8 = 6;
    /// Not of DLPack: records of several fields, which have their number instead of lanes.
    pub(super) const STRUCTURED: u8 = 255;
}

/// The type of an array's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataType {
    /// Code of DLPack.
    code: u8,
    /// Bits of an element.
    bits: u8,
    /// Elements that count as one, as in vector types.
    lanes: u16,
}

/// A type with its names: ours; the codes of DLPack; of `__array_interface__`, and of the buffer
/// protocol, where these have the type.
struct Known {
    name: &'static str,
    code: u8,
    bits: u8,
    array_interface: Option<&'static str>,
    buffer: Option<&'static std::ffi::CStr>,
}

const fn standard(
    name: &'static str,
    (code, bits): (u8, u8),
    array_interface: &'static str,
    buffer: &'static std::ffi::CStr,
) -> Known {
    Known { name, code, bits, array_interface: Some(array_interface), buffer: Some(buffer) }
}

const fn narrow(name: &'static str, code: u8, bits: u8) -> Known {
    Known { name, code, bits, array_interface: None, buffer: None }
}

const KNOWN: [Known; 27] = [
    standard("bool", (code::BOOL, 8), "|b1", c"?"),
    standard("int8", (code::INT, 8), "|i1", c"b"),
    standard("int16", (code::INT, 16), "<i2", c"h"),
    standard("int32", (code::INT, 32), "<i4", c"i"),
    standard("int64", (code::INT, 64), "<i8", c"q"),
    standard("uint8", (code::UINT, 8), "|u1", c"B"),
    standard("uint16", (code::UINT, 16), "<u2", c"H"),
    standard("uint32", (code::UINT, 32), "<u4", c"I"),
    standard("uint64", (code::UINT, 64), "<u8", c"Q"),
    standard("float16", (code::FLOAT, 16), "<f2", c"e"),
    standard("float32", (code::FLOAT, 32), "<f4", c"f"),
    standard("float64", (code::FLOAT, 64), "<f8", c"d"),
    standard("complex64", (code::COMPLEX, 64), "<c8", c"Zf"),
    standard("complex128", (code::COMPLEX, 128), "<c16", c"Zd"),
    narrow("bfloat16", code::BFLOAT, 16),
    narrow("float8_e3m4", 7, 8),
    narrow("float8_e4m3", 8, 8),
    narrow("float8_e4m3b11fnuz", 9, 8),
    narrow("float8_e4m3fn", 10, 8),
    narrow("float8_e4m3fnuz", 11, 8),
    narrow("float8_e5m2", 12, 8),
    narrow("float8_e5m2fnuz", 13, 8),
    narrow("float8_e8m0fnu", 14, 8),
    narrow("float6_e2m3fn", 15, 6),
    narrow("float6_e3m2fn", 16, 6),
    narrow("float4_e2m1fn", 17, 4),
    narrow("int4", code::INT, 4),
];

impl DataType {
    pub(crate) const UINT8: Self = Self { code: code::UINT, bits: 8, lanes: 1 };
    pub(crate) const FLOAT64: Self = Self { code: code::FLOAT, bits: 64, lanes: 1 };

    fn known(self) -> Option<&'static Known> {
        KNOWN.iter().find(|known| (known.code, known.bits) == (self.code, self.bits))
    }

    /// By its name, or by that of another library: `torch.float32`, `<f4`. None if it is unknown,
    /// or in the other byte order.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.starts_with('{') {
            return Structured::parse(text).map(Self::of_records);
        }
        let name = text.rsplit('.').next().unwrap_or_default();
        // PyTorch has two elements in a byte of this type.
        let (name, lanes) = match name {
            "float4_e2m1fn_x2" => ("float4_e2m1fn", 2),
            name => (name, 1),
        };
        let known = KNOWN.iter().find(|known| {
            known.name == name || known.array_interface.is_some_and(|typestr| typestr == text)
        })?;
        Some(Self { code: known.code, bits: known.bits, lanes })
    }

    /// Records, by the description in a message.
    pub(crate) fn received_records(text: &str) -> Option<Self> {
        Structured::received(text).map(Self::of_records)
    }

    /// Is it the code of records, in the header of a message?
    pub(crate) fn is_of_records(code: u8) -> bool {
        code == code::STRUCTURED
    }

    fn of_records(structured: Structured) -> Self {
        Self { code: code::STRUCTURED, bits: 0, lanes: structured.number() }
    }

    /// The fields of records; None for elements of one number.
    pub(crate) fn structured(self) -> Option<Structured> {
        (self.code == code::STRUCTURED).then(|| Structured::numbered(self.lanes))
    }

    /// By the format of the buffer protocol, and the size of an item.
    pub(crate) fn from_buffer(format: &str, item_size: usize) -> Option<Self> {
        let format = match format.strip_prefix(['@', '=', '<']) {
            Some(rest) => rest,
            None => format,
        };
        let bits = u8::try_from(item_size.checked_mul(8)?).ok()?;
        let code = match format {
            "?" => code::BOOL,
            "b" | "h" | "i" | "l" | "q" | "n" => code::INT,
            "B" | "H" | "I" | "L" | "Q" | "N" | "c" => code::UINT,
            "e" | "f" | "d" => code::FLOAT,
            "Zf" | "Zd" => code::COMPLEX,
            _ => return None,
        };
        let found = Self { code, bits, lanes: 1 };
        found.known().map(|_| found)
    }

    /// From codes that were received; None if they are unknown.
    pub(crate) fn from_codes(code: u8, bits: u8, lanes: u16) -> Option<Self> {
        let found = Self { code, bits, lanes };
        found.known().filter(|_| (1..=16).contains(&lanes)).map(|_| found)
    }

    /// Code of DLPack, bits of an element, and lanes.
    pub(crate) fn codes(self) -> (u8, u8, u16) {
        (self.code, self.bits, self.lanes)
    }

    /// Of `__array_interface__`; None if that has no name for it.
    pub(crate) fn array_interface(self) -> Option<&'static str> {
        self.known().filter(|_| self.lanes == 1)?.array_interface
    }

    /// The type of `__array_interface__` whose elements have the same bytes; None if elements share
    /// bytes.
    pub(crate) fn raw_interface(self) -> Option<String> {
        let size = self.item_size()?;
        Some(match self.array_interface() {
            Some(name) => name.to_owned(),
            None if self.structured().is_some() => format!("|V{size}"),
            None if size == 1 => "|u1".to_owned(),
            None => format!("<u{size}"),
        })
    }

    /// Number of bits of an element; None for records.
    pub(crate) fn element_bits(self) -> Option<u8> {
        self.structured().is_none().then_some(self.bits)
    }

    /// Of the buffer protocol; None if that has no format for it.
    pub(crate) fn buffer_format(self) -> Option<&'static std::ffi::CStr> {
        self.known().filter(|_| self.lanes == 1)?.buffer
    }

    /// Bits of one element, with its lanes.
    fn item_bits(self) -> u64 {
        match self.structured() {
            Some(structured) => structured.size() * 8,
            None => u64::from(self.bits) * u64::from(self.lanes),
        }
    }

    /// Bytes of one element, with its lanes; None if that is no whole number.
    pub(crate) fn item_size(self) -> Option<u64> {
        let bits = self.item_bits();
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// Bytes of this many contiguous elements; None beyond all addresses.
    pub(crate) fn bytes(self, elements: u64) -> Option<u64> {
        let bits = u128::from(elements) * u128::from(self.item_bits());
        i64::try_from(bits.div_ceil(8)).ok().map(i64::cast_unsigned)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(structured) = self.structured() {
            return f.write_str(structured.text());
        }
        let name = self.known().map_or("unknown", |known| known.name);
        match self.lanes {
            1 => f.write_str(name),
            lanes => write!(f, "{name}_x{lanes}"),
        }
    }
}
