//! The loaders' measurements as text.

use super::{Data, Measured, Row, STEP_PAIRS, WATCHED};
use crate::peers::report::shown;

const MB: f64 = 1e6;
/// The most of the faster PyTorch's extra memory.
const MEMORY: f64 = 0.1;
/// The most of a training step's time with data in memory.
const STEP: f64 = 1.02;

/// The whole section.
pub fn page(all: &[Measured], pairs: usize) -> String {
    let mut text = format!(
        "\n## Loading data\n\n\
         `Loader` beside PyTorch's `DataLoader`: the same files, the same transforms, batches of 32 or as said, shuffled, whole \
         epochs in turns ({pairs} pairs). Tokens are rows of 256 and the tokens that follow them, 64-bit, from \
         a file of 16-bit ones that numpy maps for PyTorch and that memfit reads by position, or, by choice, maps too: \
         what it then holds beyond are pages of the file. Pictures are JPEG files of 500×375, decoded, \
         resized to 224×224 (bilinear, antialiased) and normalised: by `zune-jpeg` and `fast_image_resize`, in PyTorch by \
         Pillow and as torchvision's transforms do it. Speed is samples a second over the faster of PyTorch's two. \
         memfit prefetches one batch of pictures and two of tokens, PyTorch two per \
         worker, its default. Extra memory is what the process and its workers hold at the epochs' peak (proportional set size) beyond \
         what they held before the loader was made: of all pages, and of those that are no file's. It was watched for {} s of \
         whole epochs, each side alone.\n\n\
         | data | side | workers | speed | extra MB | without file pages |\n\
         | --- | --- | --- | --- | --- | --- |\n",
        WATCHED.as_secs()
    );
    all.iter().for_each(|measured| text += &rows(measured));
    text += &format!(
        "\nA training step on one thread with batches from a loader of one worker, over the same step with batches \
         in memory ({STEP_PAIRS} pairs). A step takes longer than its batch takes to load, else it would wait for the \
         loader: that of pictures has batches of 8 and a network that is slow enough.\n\n| data | time |\n| --- | --- |\n"
    );
    let stepped = all.iter().filter(|measured| !measured.step.shown.is_empty());
    stepped.for_each(|measured| text += &format!("| {} | {} |\n", measured.data.words, measured.step.shown));
    text += "\n";
    for measured in all {
        let (words, difference) = (measured.data.words, measured.difference);
        if difference.most > 0.0 {
            text += &format!("- {words}: the two sides' numbers, of deviation 1, differ by {difference}\n");
        }
        measured.step.others.iter().for_each(|line| text += &format!("- {line}\n"));
    }
    text + &short(all)
}

/// The rows of one kind of data.
pub fn rows(measured: &Measured) -> String {
    let row = |row: &Row| {
        let side = if row.memfit { "memfit" } else { "PyTorch" };
        let (all, kept) = (row.extra.all as f64 / MB, row.extra.kept as f64 / MB);
        let speed = shown(row.speed);
        format!("| {} | {side} | {} | {speed} | {all:.1} | {kept:.1} |\n", measured.data.words, row.workers)
    };
    measured.rows.iter().map(row).collect()
}

/// The goals, and which are missed by how much.
fn short(all: &[Measured]) -> String {
    let goal = |Measured { data, .. }: &Measured| format!("{} at {} times", data.words, data.speed);
    let speeds: Vec<String> = all.iter().map(goal).collect();
    let mut text = format!(
        "\nGoals, for the faster of memfit's two: {} the speed of the faster of PyTorch's, with at most {MEMORY} of its \
         extra memory; a training step at most {STEP}. ",
        speeds.join(", ")
    );
    let missed: Vec<String> = all.iter().flat_map(missed).collect();
    if missed.is_empty() {
        return text + "All are met.\n";
    }
    text += "Not met:\n\n";
    missed.iter().for_each(|line| text += &format!("- {line}\n"));
    text
}

fn missed(measured: &Measured) -> Vec<String> {
    let Data { words, speed: goal, .. } = measured.data;
    let mut missed = Vec::new();
    if let (Some(ours), Some(theirs)) = (faster(measured, true), faster(measured, false)) {
        let speed = ours.speed.median;
        if speed.is_nan() || speed < goal {
            missed.push(format!("{words}: speed {speed:.2}, goal {goal}"));
        }
        let share = ours.extra.all as f64 / theirs.extra.all as f64;
        if share.is_nan() || share > MEMORY {
            missed.push(format!("{words}: extra memory {share:.2} of the faster PyTorch's, goal {MEMORY}"));
        }
    }
    if measured.step.ratio > STEP {
        missed.push(format!("{words}: a training step beside it {:.3}, goal {STEP}", measured.step.ratio));
    }
    missed
}

fn faster(measured: &Measured, memfit: bool) -> Option<&Row> {
    let rows = measured.rows.iter().filter(|row| row.memfit == memfit);
    rows.max_by(|a, b| a.speed.median.total_cmp(&b.speed.median))
}

#[cfg(test)]
mod tests {
    use super::super::same::Apart;
    use super::super::{PICTURES, Step};
    use super::*;
    use crate::peers::measure::Spread;
    use crate::peers::resident::Resident;

    fn row(memfit: bool, workers: usize, speed: f64, megabytes: u64) -> Row {
        let extra = Resident { all: megabytes * 1_000_000, kept: megabytes * 500_000 };
        Row { memfit, workers, speed: Spread { median: speed, least: speed, most: speed }, extra }
    }

    fn measured(rows: Vec<Row>, ratio: f64) -> Measured {
        let step =
            Step { ratio, shown: format!("{ratio:.3} (x)"), others: vec!["a step takes 20 ms".to_owned()] };
        Measured { data: PICTURES, rows, difference: Apart { mean: 0.0067, most: 0.0523 }, step }
    }

    #[test]
    fn the_faster_ones_are_held_to_the_goals() {
        let good = measured(
            vec![row(true, 0, 1.9, 90), row(true, 2, 2.5, 9), row(false, 0, 0.5, 1), row(false, 2, 1.0, 100)],
            1.01,
        );
        let text = page(std::slice::from_ref(&good), 7);
        assert!(text.contains("| pictures | memfit | 2 | 2.50 (2.50–2.50) | 9.0 | 4.5 |\n"), "{text}");
        assert!(
            text.contains("| pictures | 1.010 (x) |\n")
                && text.contains("differ by 0.0067 in the mean and 0.0523 at most"),
            "{text}"
        );
        assert!(text.contains("for 3 s of whole epochs, each side alone"), "{text}");
        assert!(text.contains("batches of 8 and") && text.contains("pictures at 2 times"), "{text}");
        assert!(text.contains("- a step takes 20 ms\n") && text.ends_with("All are met.\n"), "{text}");
    }

    #[test]
    fn a_goal_that_is_missed_is_named_with_both_numbers() {
        let bad = measured(vec![row(true, 2, 1.5, 30), row(false, 0, 1.0, 100)], 1.25);
        let text = page(&[bad], 7);
        for line in [
            "- pictures: speed 1.50, goal 2\n",
            "- pictures: extra memory 0.30 of the faster PyTorch's, goal 0.1\n",
            "- pictures: a training step beside it 1.250, goal 1.02\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }
}
