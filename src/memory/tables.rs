use std::fmt::{self, Display, Formatter};

use super::role::RoleBytes;
use super::timeline::{OLDER, Peak, Timeline};

/// Lines of a table whose end says how many were left out.
const LINES: usize = 8;

impl Timeline {
    /// The figures of every device ([`memory::summary`](super::summary)), then the peak of this
    /// timeline by role, by segment and by holder.
    pub fn summary(&self) -> String {
        format!("{}\n{self}", super::summary())
    }
}

/// The peak, by role, by segment and by holder.
impl Display for Timeline {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let peak = self.peak();
        let segment = peak.segment.as_ref().map(|name| format!(", segment {}", shown(name)));
        writeln!(
            f,
            "peak {} in {} of step {}{}, {:.1} ms after the start",
            amount(peak.bytes),
            peak.phase.name(),
            peak.step,
            segment.unwrap_or_default(),
            peak.time.as_secs_f64() * 1e3
        )?;
        if self.lost() > 0 {
            writeln!(f, "of the newest events: {} older ones did not fit", self.lost())?;
        }
        roles(f, &peak, &self.highest())?;
        segments(f, &peak)?;
        holders(f, &peak)?;
        for refusal in self.refusals() {
            let (asked, live) = (amount(refusal.bytes), amount(refusal.live));
            let milliseconds = refusal.time.as_secs_f64() * 1e3;
            writeln!(f, "refused: {asked} with {live} live, {milliseconds:.1} ms after the start")?;
        }
        Ok(())
    }
}

fn roles(f: &mut Formatter<'_>, peak: &Peak, highest: &RoleBytes) -> fmt::Result {
    writeln!(f, "{:<18}{:>14}{:>9}{:>18}", "role", "at the peak", "share", "its own highest")?;
    for (role, bytes) in peak.roles.iter().filter(|(role, _)| highest[*role] > 0) {
        let share = share(bytes, peak);
        let (at, own) = (amount(bytes), amount(highest[role]));
        writeln!(f, "{:<18}{at:>14}{share:>9}{own:>18}", role.name())?;
    }
    Ok(())
}

/// Nothing where nobody named a segment.
fn segments(f: &mut Formatter<'_>, peak: &Peak) -> fmt::Result {
    let segments = peak.segments();
    if segments.iter().all(|(segment, _)| segment.as_deref().is_none_or(|name| name == OLDER)) {
        return Ok(());
    }
    writeln!(f, "{:<18}{:>14}{:>9}", "segment", "at the peak", "share")?;
    for (segment, bytes) in segments.iter().take(LINES) {
        let name = shown(segment.as_deref().unwrap_or(NO_SEGMENT));
        writeln!(f, "{name:<18}{:>14}{:>9}", amount(*bytes), share(*bytes, peak))?;
    }
    left_out(f, segments.len())
}

fn holders(f: &mut Formatter<'_>, peak: &Peak) -> fmt::Result {
    writeln!(f, "largest holders at the peak")?;
    for holder in peak.holders.iter().take(LINES) {
        let bytes = amount(holder.bytes);
        let blocks = match holder.blocks {
            0 => String::new(),
            1 => "1 block".to_owned(),
            blocks => format!("{blocks} blocks"),
        };
        let segment = shown(holder.segment.as_deref().unwrap_or(NO_SEGMENT));
        writeln!(f, "{bytes:>14}  {:<16} {segment:<28} {blocks}", holder.role.name())?;
    }
    left_out(f, peak.holders.len())
}

fn left_out(f: &mut Formatter<'_>, lines: usize) -> fmt::Result {
    if lines > LINES { writeln!(f, "  and {} smaller ones", lines - LINES) } else { Ok(()) }
}

const NO_SEGMENT: &str = "(no segment)";

fn share(bytes: u64, peak: &Peak) -> String {
    format!("{:.1}%", 100.0 * bytes as f64 / peak.bytes.max(1) as f64)
}

/// Bytes for a person, with one digit after the point.
pub(super) fn amount(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 10_000_000_000_000 => format!("{:.1} TB", bytes as f64 / 1e12),
        _ if bytes >= 10_000_000_000 => format!("{:.1} GB", bytes as f64 / 1e9),
        _ if bytes >= 1_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ if bytes >= 1_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{bytes} B"),
    }
}

/// A name as one line of text: control characters could move a terminal's cursor.
pub(super) fn shown(name: &str) -> String {
    name.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}
