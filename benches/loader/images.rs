//! JPEG files as normalised pictures of 224×224.

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use memfit::Error;
use memfit::data::{Array, Concat, Files, Loader, Random, Source};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;

use crate::{Failure, Pairs};

pub const SIDE: u32 = 224;
/// Of ImageNet, by channel.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];
/// A picture of 40×30 for where no other is there.
const SMALL: &[u8] = include_bytes!("small.jpg");

/// The folder's pictures, `repeat` times an epoch, and a number each.
pub fn loader(
    folder: &Path,
    repeat: usize,
    batch: usize,
    workers: usize,
    shuffled: bool,
) -> Result<Pairs, Failure> {
    let tables = tables();
    let files = Concat::of(vec![Files::in_folder(folder, &["jpg"])?; repeat])?;
    let loader = Loader::new(files)
        .map(move |file, _| Ok((decode(&file.bytes, &tables)?, (file.index % 10) as i64)))
        .batch(batch)
        .workers(workers)
        .prefetch(crate::PREFETCH);
    Ok(if shuffled { loader.shuffle(1).build() } else { loader.build() }?)
}

/// Uses once what a loader uses.
pub fn warm_up(folder: &Path) -> Result<(), Failure> {
    let file = Files::in_folder(folder, &["jpg"])?.get(0, &mut Random::of_sample(0, 0, 0))?;
    decode(&file.bytes, &tables()).map(drop).map_err(Into::into)
}

pub fn write_small(folder: &Path, count: usize) -> Result<(), Failure> {
    Ok((0..count).try_for_each(|index| fs::write(folder.join(format!("{index:05}.jpg")), SMALL))?)
}

/// The normalised number of each channel's 256 levels.
type Tables = [[f32; 256]; 3];

fn tables() -> Tables {
    let level = |channel: usize, level: usize| (level as f32 / 255.0 - MEAN[channel]) / DEVIATION[channel];
    std::array::from_fn(|channel| std::array::from_fn(|value| level(channel, value)))
}

/// What a thread uses again for each picture.
struct Scratch {
    decoded: Vec<u8>,
    resized: Image<'static>,
    resizer: Resizer,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        decoded: Vec::new(),
        resized: Image::new(SIDE, SIDE, PixelType::U8x3),
        resizer: Resizer::new(),
    });
}

/// A JPEG file as numbers of `[3, 224, 224]`.
fn decode(bytes: &[u8], tables: &Tables) -> memfit::Result<Array> {
    let wrong = |error: &dyn std::fmt::Display| Error::data(error.to_string());
    SCRATCH.with_borrow_mut(|scratch| {
        let Scratch { decoded, resized, resizer } = scratch;
        let mut decoder = JpegDecoder::new(ZCursor::new(bytes));
        decoder.decode_headers().map_err(|error| wrong(&error))?;
        let (Some(size), Some((width, height))) = (decoder.output_buffer_size(), decoder.dimensions()) else {
            return Err(Error::data("a JPEG without a size"));
        };
        decoded.resize(size, 0);
        decoder.decode_into(decoded).map_err(|error| wrong(&error))?;
        let picture = ImageRef::new(width as u32, height as u32, decoded, PixelType::U8x3);
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
        let picture = picture.map_err(|error| wrong(&error))?;
        resizer.resize(&picture, resized, &options).map_err(|error| wrong(&error))?;
        planes(resized.buffer(), tables)
    })
}

/// One channel after the other, normalised.
fn planes(pixels: &[u8], tables: &Tables) -> memfit::Result<Array> {
    let mut numbers = Vec::with_capacity(pixels.len());
    for (channel, table) in tables.iter().enumerate() {
        numbers.extend(pixels.chunks_exact(3).map(|pixel| table[usize::from(pixel[channel])]));
    }
    let side = i64::from(SIDE);
    Array::from_vec(vec![3, side, side], numbers)
}
