//! Which powers of two keep the gradients of fp16 products within fp16.

use crate::ffi::loss::Counted;

/// What gradients are multiplied by on their way through the products; backward undoes both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scales {
    /// The logits' gradients.
    pub(super) gradient: f64,
    /// Rows of hidden, for the weight's gradient.
    pub(super) rows: f64,
}

/// fp16's largest number, and a power of two that leaves its sums room for rounding.
const MOST: f64 = 65504.0;
const ROOM: f64 = 32768.0;

/// Of a token of the largest weight: small probabilities keep all their bits down to 2⁻²⁰, some
/// to 2⁻³⁰. More would be taken from the bits of hidden.
const LARGEST_GRADIENT: f64 = 64.0;

impl Scales {
    /// Where products have fp32's range: as it is, times `norm`.
    pub(super) fn of_wide(norm: f64) -> Self {
        Self { gradient: norm, rows: 1.0 }
    }

    /// For products in fp16, in chunks of so many rows.
    ///
    /// A loss scale comes too late to help here: it is known in backward, when the products are
    /// done. So no sum in them may overflow, whatever the tensors hold.
    pub(super) fn of_half(counted: &Counted, z: f64, classes: f64, rows: f64) -> Self {
        // Anything else is infinite or NaN in fp16 already.
        let within = |size: f64| if size <= MOST { size } else { MOST };
        let token = if counted.most_token > 0.0 { counted.most_token } else { 1.0 };
        // A token's gradients, all classes together, are at most this many times its weight.
        let grown = 2.0 + 2.0 * z * (MOST + classes.ln());
        let weight = within(counted.most_weight).max(1.0);
        let gradient = power_below((ROOM / (grown * weight)).min(LARGEST_GRADIENT) / token);
        // All rows of a chunk may add up in one class.
        let sum = gradient * grown * counted.weight.min(rows * token);
        let hidden = within(counted.most_hidden).max(1.0 / MOST);
        Self { gradient, rows: power_below((ROOM / hidden).min(ROOM / (hidden * sum))) }
    }
}

/// The largest power of two that is not above a number, within what fp32 can undo.
fn power_below(number: f64) -> f64 {
    number.log2().floor().clamp(-120.0, 120.0).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(tokens: f64, token: f64, hidden: f64, weight: f64) -> Counted {
        Counted {
            weight: tokens * token,
            tokens: tokens as u64,
            most_token: token,
            most_hidden: hidden,
            most_weight: weight,
            bad: None,
        }
    }

    #[test]
    fn no_product_passes_fp16_whatever_the_sizes() {
        for tokens in [1.0, 100.0, 8192.0, 1e7] {
            for token in [1e-30, 1e-3, 1.0, 7e4, 1e30] {
                for hidden in [0.0, 1e-4, 10.0, 65504.0, f64::INFINITY, f64::NAN] {
                    for weight in [0.0, 0.02, 3.0, 65504.0, f64::NAN] {
                        for z in [0.0, 1e-4, 1.0] {
                            let seen = counted(tokens, token, hidden, weight);
                            let Scales { gradient, rows } = Scales::of_half(&seen, z, 1e5, tokens);
                            let grown = 2.0 + 2.0 * z * (MOST + 1e5f64.ln());
                            let one = gradient * token * grown;
                            assert!(one * weight.min(MOST).max(1.0) <= MOST, "{seen:?} {z}");
                            assert!(one * tokens * rows * hidden.min(MOST) <= MOST, "{seen:?} {z}");
                            assert!(rows * hidden.min(MOST) <= MOST, "{seen:?} {z}");
                            assert_eq!(gradient.log2().fract() + rows.log2().fract(), 0.0);
                        }
                    }
                }
            }
        }
    }

    /// Subnormals of fp16 begin below 2⁻¹⁴.
    #[test]
    fn usual_sizes_keep_what_is_small() {
        let seen = counted(8192.0, 1.0, 4.0, 0.1);
        let Scales { gradient, rows } = Scales::of_half(&seen, 1e-4, 50_000.0, 512.0);
        assert!(gradient >= 64.0, "{gradient}");
        assert!(rows * 4.0 >= 2f64.powi(-5), "{rows}");
    }
}
