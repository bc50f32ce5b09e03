use miniz_oxide::deflate::compress_to_vec_zlib;

use super::raster::Image;
use crate::error::{Error, Result};

/// An image as a PNG file of 8-bit RGB.
pub(super) fn encode(image: &Image) -> Result<Vec<u8>> {
    let side = |length: usize| {
        u32::try_from(length).map_err(|_| Error::config("png", "the image is wider than 2^32 pixels"))
    };
    let mut header = Vec::new();
    header.extend(side(image.width)?.to_be_bytes());
    header.extend(side(image.height)?.to_be_bytes());
    header.extend([8, 2, 0, 0, 0]);
    let mut rows = Vec::with_capacity((image.width * 3 + 1) * image.height);
    for row in image.pixels.chunks_exact(image.width * 3) {
        rows.push(0); // the row is stored as it is
        rows.extend_from_slice(row);
    }
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut file, b"IHDR", &header);
    chunk(&mut file, b"IDAT", &compress_to_vec_zlib(&rows, 6));
    chunk(&mut file, b"IEND", &[]);
    Ok(file)
}

fn chunk(file: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    let start = file.len();
    file.extend(kind);
    file.extend(data);
    let sum = crc32fast::hash(&file[start..]);
    file.extend(sum.to_be_bytes());
}
