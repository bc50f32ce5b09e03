use super::Color;
use crate::memory::phase::Phase;
use crate::memory::role::Role;

/// From the bottom up: what stays lies under what comes and goes.
pub(in crate::memory) const STACKED: [Role; 8] = [
    Role::Other,
    Role::Parameters,
    Role::Buffers,
    Role::OptimizerState,
    Role::HostCopies,
    Role::Gradients,
    Role::Activations,
    Role::Temporaries,
];

/// Those of Okabe and Ito, "Color Universal Design" (2008), and a grey: they stay apart for
/// colour-blind readers.
pub(in crate::memory) fn color_of(role: Role) -> Color {
    match role {
        Role::Parameters => [0x00, 0x72, 0xb2],
        Role::Buffers => [0x56, 0xb4, 0xe9],
        Role::Gradients => [0xd5, 0x5e, 0x00],
        Role::Activations => [0x00, 0x9e, 0x73],
        Role::OptimizerState => [0xcc, 0x79, 0xa7],
        Role::Temporaries => [0xe6, 0x9f, 0x00],
        Role::HostCopies => [0xf0, 0xe4, 0x42],
        Role::Other => [0xb8, 0xb8, 0xb8],
    }
}

pub(in crate::memory) fn color_of_phase(phase: Phase) -> Color {
    match phase {
        Phase::Idle => [0xee, 0xee, 0xee],
        Phase::Forward => [0xa9, 0xd3, 0xf5],
        Phase::Recompute => [0xfb, 0xe5, 0x8a],
        Phase::Backward => [0xe9, 0xa2, 0x7c],
        Phase::Update => [0x6f, 0xa0, 0x8c],
        Phase::Evaluate => [0x9a, 0x8f, 0xc0],
    }
}

/// Of [`CURVES`](super::resident::CURVES), from the same colours as the roles'.
pub(super) const CURVES: [Color; 3] = [[0xe6, 0x9f, 0x00], [0x00, 0x72, 0xb2], [0x00, 0x9e, 0x73]];

#[cfg(test)]
mod tests {
    use super::*;

    type Linear = [f64; 3];

    /// How protanopes, deuteranopes and tritanopes see: Machado et al., "A Physiologically-based
    /// Model for Simulation of Color Vision Deficiency" (2009), at full severity.
    const SIGHTS: [[[f64; 3]; 3]; 4] = [
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ];
    const XYZ: [[f64; 3]; 3] = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]];

    fn linear(color: Color) -> Linear {
        color.map(|part| {
            let part = f64::from(part) / 255.0;
            if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
        })
    }

    fn times(matrix: &[[f64; 3]; 3], vector: Linear) -> Linear {
        matrix.map(|row| row.iter().zip(vector).map(|(a, b)| a * b).sum())
    }

    fn lab(color: Linear) -> Linear {
        let white = [0.9505, 1.0, 1.089];
        let mut f = times(&XYZ, color);
        for (part, white) in f.iter_mut().zip(white) {
            let share = *part / white;
            *part = if share > 0.008856 { share.cbrt() } else { 7.787 * share + 16.0 / 116.0 };
        }
        [116.0 * f[1] - 16.0, 500.0 * (f[0] - f[1]), 200.0 * (f[1] - f[2])]
    }

    /// The least distance of two colours to any of the eyes; about 2 can just be told apart.
    fn distance(a: Color, b: Color) -> f64 {
        let seen =
            |sight: &[[f64; 3]; 3], color| lab(times(sight, linear(color)).map(|part| part.clamp(0.0, 1.0)));
        let apart = |sight: &[[f64; 3]; 3]| {
            let squares = seen(sight, a).into_iter().zip(seen(sight, b)).map(|(a, b)| (a - b) * (a - b));
            squares.sum::<f64>().sqrt()
        };
        SIGHTS.iter().map(apart).fold(f64::INFINITY, f64::min)
    }

    fn assert_apart<T: Copy + std::fmt::Debug>(all: &[T], color: impl Fn(T) -> Color) {
        for (index, one) in all.iter().enumerate() {
            for other in &all[index + 1..] {
                let apart = distance(color(*one), color(*other));
                assert!(apart > 12.0, "{one:?} and {other:?} are {apart:.1} apart");
            }
        }
    }

    #[test]
    fn colour_blind_readers_can_tell_roles_and_phases_apart() {
        assert_eq!(distance([0, 0, 0], [0, 0, 0]), 0.0);
        assert_apart(&STACKED, color_of);
        assert_apart(&Phase::ALL, color_of_phase);
        assert_apart(&CURVES, |color| color);
    }
}
