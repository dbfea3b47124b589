//! Numbers as bytes, in the order of this machine. Memory that peers write is copied, never borrowed.

/// The bytes of numbers.
#[must_use]
pub fn to_bytes(numbers: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(numbers)];
    for (part, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
        *part = number.to_ne_bytes();
    }
    bytes
}

/// Reads numbers from their bytes, into the start of `numbers`.
pub fn from_bytes(bytes: &[u8], numbers: &mut [f64]) {
    for (number, part) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        *number = f64::from_ne_bytes(*part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_restored_from_their_bytes() {
        let numbers = [1.5, -0.0, f64::MAX];
        let mut found = [0.0; 3];
        from_bytes(&to_bytes(&numbers), &mut found);
        assert_eq!(found.map(f64::to_bits), numbers.map(f64::to_bits));
    }
}
