//! NumPy's array file, version 1.0 (numpy.lib.format).

/// A one-dimensional array of 32-bit floats as the bytes of an `.npy` file.
pub(super) fn encode(values: &[f32]) -> Vec<u8> {
    let mut header =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({},), }}", values.len());
    // Magic, version and length take 10 bytes; the whole is padded to 64 and ends with a line feed.
    let padding = (64 - (10 + header.len() + 1) % 64) % 64;
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(u16::try_from(header.len()).expect("a header of one axis is short").to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_starts_at_a_multiple_of_64_bytes() {
        for count in [0, 1, 768, 151_936] {
            let bytes = encode(&vec![1.5; count]);
            let header = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
            assert_eq!((10 + header) % 64, 0);
            assert_eq!(bytes.len(), 10 + header + 4 * count);
        }
    }
}
