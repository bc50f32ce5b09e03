//! AdamW's step with quantised moments.

use std::os::raw::c_int;

use super::mixed::{Adam, RawRounding, Rounding};
use super::optim::{Moving, RawAdam, RawMoving, run};
use crate::error::Result;

/// Numbers that share a scale.
pub(crate) const BLOCK: usize = 256;

unsafe extern "C" {
    fn mf_adam8bit_step(
        moving: *mut RawMoving,
        count: usize,
        options: *const RawAdam,
        rounding: *const RawRounding,
        moved: *mut usize,
    ) -> c_int;
}

/// Moves parameters on the CPU by their gradients ÷ divisor. State: codes and scales of the
/// first moment, then of the second; or both moments, where a parameter is not quantised.
///
/// # Errors
/// Any; nothing has moved.
pub(crate) fn step(adam: Adam, rounding: Rounding, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
    let (options, rounding) = (adam.raw(divisor), rounding.raw());
    // SAFETY: `run` lends the list for the call; the kernel checks the states it finds.
    run(moving, |raw, moved| unsafe {
        mf_adam8bit_step(raw.as_mut_ptr(), raw.len(), &options, &rounding, moved)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn mf_quantise(numbers: *const f32, count: usize, with_sign: c_int, codes: *mut u8, scales: *mut f32);
        fn mf_dequantise(
            codes: *const u8,
            scales: *const f32,
            count: usize,
            with_sign: c_int,
            numbers: *mut f32,
        );
    }

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Map {
        Signed,
        Unsigned,
    }

    fn quantise(numbers: &[f32], map: Map) -> (Vec<u8>, Vec<f32>) {
        let mut codes = vec![0; numbers.len()];
        let mut scales = vec![0.0; numbers.len().div_ceil(BLOCK)];
        let sign = (map == Map::Signed).into();
        // SAFETY: the lists have the lengths that the header asks for.
        unsafe {
            mf_quantise(numbers.as_ptr(), numbers.len(), sign, codes.as_mut_ptr(), scales.as_mut_ptr());
        }
        (codes, scales)
    }

    fn dequantise(codes: &[u8], scales: &[f32], map: Map) -> Vec<f32> {
        assert_eq!(scales.len(), codes.len().div_ceil(BLOCK));
        let mut numbers = vec![0.0; codes.len()];
        let sign = (map == Map::Signed).into();
        // SAFETY: as above.
        unsafe {
            mf_dequantise(codes.as_ptr(), scales.as_ptr(), codes.len(), sign, numbers.as_mut_ptr());
        }
        numbers
    }

    /// The published construction: decade by decade, the middles of a linear spacing from 0.1 to
    /// 1, whose number doubles.
    fn published(map: Map) -> Vec<f64> {
        let mut values = vec![0.0, 1.0];
        for exponent in 0..7 {
            let parts = 1usize << if map == Map::Signed { exponent } else { exponent + 1 };
            let edge = |part: usize| 0.1 + 0.9 * part as f64 / parts as f64;
            for part in 0..parts {
                let value = (edge(part) + edge(part + 1)) / 2.0 * 10f64.powi(exponent - 6);
                values.push(value);
                if map == Map::Signed {
                    values.push(-value);
                }
            }
        }
        values.sort_by(f64::total_cmp);
        values
    }

    fn book(map: Map) -> Vec<f32> {
        let codes: Vec<u8> = (0..=255).collect();
        dequantise(&codes, &[1.0], map)
    }

    /// Numbers of both signs over all decades, from a fixed sequence.
    fn numbers(count: usize) -> Vec<f32> {
        let mut bits = 1u32;
        let mut next = || {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(bits >> 8) / f64::from(1 << 24)
        };
        let number = |_| {
            let size = 10f64.powf(-9.0 * next());
            (if next() < 0.5 { size } else { -size }) as f32
        };
        (0..count).map(number).collect()
    }

    #[test]
    fn the_maps_are_the_published_ones() {
        for map in [Map::Signed, Map::Unsigned] {
            let (found, wanted) = (book(map), published(map));
            assert_eq!(wanted.len(), 256);
            for (found, wanted) in found.iter().zip(&wanted) {
                assert!((f64::from(*found) - wanted).abs() <= 1e-7 * wanted.abs(), "{found} {wanted}");
            }
        }
    }

    #[test]
    fn every_code_comes_back_as_itself() {
        for map in [Map::Signed, Map::Unsigned] {
            // The largest value is in the block, so that the scale is 1.
            let values = book(map);
            let (codes, scales) = quantise(&values, map);
            assert_eq!(scales, [1.0]);
            assert_eq!(codes, (0..=255).collect::<Vec<u8>>(), "{map:?}");
        }
    }

    /// Against all 256 values, within fp32 rounding.
    #[test]
    fn a_number_gets_the_nearest_code() {
        for map in [Map::Signed, Map::Unsigned] {
            let values = book(map);
            let mut all = numbers(64 * BLOCK);
            for block in all.chunks_mut(BLOCK) {
                block[17] = 1.0;
                if map == Map::Unsigned {
                    block.iter_mut().for_each(|number| *number = number.abs());
                }
            }
            // Just beside each midpoint.
            for pair in values.windows(2) {
                let (low, high) = (f64::from(pair[0]), f64::from(pair[1]));
                for part in [0.499, 0.501] {
                    all.push((low + part * (high - low)) as f32);
                }
                if all.len() % BLOCK == 0 {
                    all.push(1.0);
                }
            }
            all.resize(all.len().next_multiple_of(BLOCK), 1.0);
            let (codes, scales) = quantise(&all, map);
            let found = dequantise(&codes, &scales, map);
            for (index, (number, found)) in all.iter().zip(&found).enumerate() {
                let scale = f64::from(scales[index / BLOCK]);
                let distance = |value: f64| (f64::from(*number) - value * scale).abs();
                let away = values.iter().map(|value| distance(f64::from(*value)));
                let nearest = away.fold(f64::INFINITY, f64::min);
                let excess = distance(f64::from(*found) / scale) - nearest;
                let small = map == Map::Unsigned && f64::from(*number) < f64::from(values[1]) * scale;
                let bound = 1e-4 * nearest + 1e-7 * f64::from(number.abs());
                assert!(excess <= bound || small, "{map:?}: {number} became {found}, scale {scale}");
            }
        }
    }

    #[test]
    fn a_positive_second_moment_never_becomes_zero_and_zero_stays() {
        for largest in [1.0f32, 1e-30, 1e30, 1e-40] {
            let block = [largest, (largest * 1e-9).max(f32::from_bits(2)), f32::from_bits(1), 0.0];
            let (codes, scales) = quantise(&block, Map::Unsigned);
            assert!(codes[..3].iter().all(|code| *code > 0), "{codes:?}");
            assert_eq!((codes[0], codes[3]), (255, 0));
            assert_eq!(dequantise(&codes, &scales, Map::Unsigned)[0], largest, "a tiny scale is exact too");
        }
        let (_, scales) = quantise(&[0.0; 300], Map::Unsigned);
        assert_eq!(scales, [0.0, 0.0]);
        // Made-up codes of a state that was never written decode to zero.
        assert!(dequantise(&[0; 3], &[0.0], Map::Signed).iter().all(|number| *number == 0.0));
    }

    #[test]
    fn zero_is_a_code_of_both_maps_and_signs_are_kept() {
        let (codes, scales) = quantise(&[0.0, -0.0, 0.5, -0.5, -1.0], Map::Signed);
        let found = dequantise(&codes, &scales, Map::Signed);
        assert_eq!(&found[..2], [0.0, 0.0]);
        assert_eq!(found[2], -found[3]);
        assert!(found[4] < -0.99, "the map has no -1");
    }

    #[test]
    fn what_is_not_finite_makes_its_block_nan_and_no_other() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = vec![0.25f32; 2 * BLOCK];
            numbers[3] = bad;
            let (codes, scales) = quantise(&numbers, Map::Signed);
            let found = dequantise(&codes, &scales, Map::Signed);
            assert!(found[..BLOCK].iter().all(|number| number.is_nan()));
            assert!(found[BLOCK..].iter().all(|number| *number == 0.25));
        }
    }
}
