//! From events to figures per operator.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::AddAssign;
use std::time::Duration;

use crate::ffi::profiler::{Event, EventKind};

/// What was used up.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Time on the host.
    pub time: Duration,
    /// Bytes allocated less bytes freed on the host; negative where more was freed.
    pub memory: i64,
    /// Time of an accelerator's kernels and copies.
    pub device_time: Duration,
    /// Bytes allocated less bytes freed on accelerators.
    pub device_memory: i64,
}

impl AddAssign for Figures {
    fn add_assign(&mut self, other: Self) {
        self.time += other.time;
        self.memory += other.memory;
        self.device_time += other.device_time;
        self.device_memory += other.device_memory;
    }
}

/// All calls of one operator.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operator {
    /// libtorch's name: `aten::mm`; `[memory]` for what was allocated and freed outside
    /// operators.
    pub name: String,
    /// How often it ran; of `[memory]`, how many allocations and frees.
    pub calls: u64,
    /// Its own work, without the operators that it called: the *self* columns.
    pub own: Figures,
    /// With the operators that it called. A call within a call of the same name counts once.
    pub total: Figures,
}

/// An operator that has begun.
struct Open {
    name: usize,
    end: u64,
    length: u64,
    own: Figures,
    /// What its children used up.
    below: Figures,
}

/// Sums the events up by name, in the order of the names.
pub(super) fn operators(events: &[Event], names: &[String]) -> Vec<Operator> {
    let mut sums: Vec<Operator> =
        names.iter().map(|name| Operator { name: name.clone(), ..Operator::default() }).collect();
    let mut of_operator: HashMap<u64, u64> = HashMap::new();
    for work in events.iter().filter(|event| event.kind() == EventKind::DeviceWork) {
        *of_operator.entry(work.correlation).or_default() += work.length;
    }
    let mut order: Vec<&Event> =
        events.iter().filter(|event| event.kind() != EventKind::DeviceWork).collect();
    // What starts together: first who lasts longer, then what has no length.
    order.sort_by_key(|event| {
        let memory = matches!(event.kind(), EventKind::Memory | EventKind::DeviceMemory);
        (event.thread, event.start, memory, Reverse(event.length))
    });
    for of_thread in order.chunk_by(|a, b| a.thread == b.thread) {
        let mut open: Vec<Open> = Vec::new();
        for event in of_thread {
            match event.kind() {
                EventKind::Operator => {
                    close(&mut open, &mut sums, |one| one.end <= event.start);
                    open.push(begin(event, open.last(), &of_operator));
                }
                EventKind::Crossing => {
                    if let Some(sum) = sums.get_mut(event.name as usize) {
                        sum.calls += 1;
                        sum.total.time += Duration::from_nanos(event.length);
                    }
                }
                _ => {
                    // At its very end it is still inside.
                    close(&mut open, &mut sums, |one| one.end < event.start);
                    note(event, open.last_mut(), &mut sums);
                }
            }
        }
        close(&mut open, &mut sums, |_| true);
    }
    sums.retain(|sum| sum.calls > 0);
    sums
}

fn begin(event: &Event, parent: Option<&Open>, of_operator: &HashMap<u64, u64>) -> Open {
    let end = event.start + event.length;
    // Clocks are read one after the other: a child may seem to end after its parent.
    let end = parent.map_or(end, |parent| end.min(parent.end.max(event.start)));
    let device = of_operator.get(&event.correlation).copied().unwrap_or_default();
    let own = Figures { device_time: Duration::from_nanos(device), ..Figures::default() };
    Open { name: event.name as usize, end, length: end - event.start, own, below: Figures::default() }
}

/// Adds an allocation or a free to the operator it fell in, or to those outside.
fn note(event: &Event, inside: Option<&mut Open>, sums: &mut [Operator]) {
    let bytes = match event.kind() {
        EventKind::DeviceMemory => Figures { device_memory: event.bytes, ..Figures::default() },
        _ => Figures { memory: event.bytes, ..Figures::default() },
    };
    if let Some(open) = inside {
        open.own += bytes;
    } else if let Some(sum) = sums.get_mut(event.name as usize) {
        sum.calls += 1;
        sum.own += bytes;
        sum.total += bytes;
    }
}

/// Ends operators, the innermost first, as long as they are over.
fn close(open: &mut Vec<Open>, sums: &mut [Operator], over: impl Fn(&Open) -> bool) {
    while open.last().is_some_and(&over) {
        let Some(mut one) = open.pop() else { return };
        let length = Duration::from_nanos(one.length);
        one.own.time = length.saturating_sub(one.below.time);
        let mut total = one.own;
        total += one.below;
        total.time = length;
        if let Some(parent) = open.last_mut() {
            parent.below += total;
        }
        let Some(sum) = sums.get_mut(one.name) else { continue };
        sum.calls += 1;
        sum.own += one.own;
        if open.iter().all(|outer| outer.name != one.name) {
            sum.total += total;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn operator(name: u32, start: u64, end: u64) -> Event {
        Event::new(EventKind::Operator, name, start, end - start)
    }

    fn memory(name: u32, at: u64, bytes: i64) -> Event {
        let mut event = Event::new(EventKind::Memory, name, at, 0);
        event.bytes = bytes;
        event
    }

    fn figures(one: Figures) -> (u128, i64) {
        (one.time.as_nanos(), one.memory)
    }

    #[test]
    fn children_are_taken_off_their_parent_and_off_no_one_else() {
        let names = named(&["outer", "middle", "inner", "[memory]"]);
        let events = [
            operator(0, 0, 100),
            memory(3, 5, 1000),
            operator(1, 10, 60),
            operator(2, 20, 30),
            memory(3, 25, 64),
            operator(2, 30, 50),
            memory(3, 50, -16),
            memory(3, 55, -64),
            operator(2, 70, 90),
            memory(3, 80, 7),
            memory(3, 150, -1000),
        ];
        let found = operators(&events, &names);
        let of = |name: &str| {
            found
                .iter()
                .find(|one| one.name == name)
                .map(|one| (one.calls, figures(one.own), figures(one.total)))
        };
        assert_eq!(of("outer"), Some((1, (30, 1000), (100, 991))));
        assert_eq!(of("middle"), Some((1, (20, -64), (50, -16))));
        assert_eq!(of("inner"), Some((3, (50, 55), (50, 55))));
        assert_eq!(of("[memory]"), Some((1, (0, -1000), (0, -1000))));
        let all: i64 = found.iter().map(|one| one.own.memory).sum();
        assert_eq!(all, events.iter().map(|event| event.bytes).sum::<i64>());
    }

    #[test]
    fn a_call_within_a_call_of_its_name_counts_once_in_the_total() {
        let names = named(&["again", "other"]);
        let events = [operator(0, 0, 90), operator(1, 10, 80), operator(0, 20, 50)];
        let found = operators(&events, &names);
        assert_eq!((found[0].calls, figures(found[0].own).0, figures(found[0].total).0), (2, 50, 90));
        assert_eq!((figures(found[1].own).0, figures(found[1].total).0), (40, 70));
    }

    #[test]
    fn threads_do_not_nest_in_each_other() {
        let names = named(&["here", "there", "[memory]"]);
        let mut elsewhere = operator(1, 10, 40);
        elsewhere.thread = 7;
        let mut freed = memory(2, 20, -8);
        freed.thread = 7;
        let found = operators(&[operator(0, 0, 100), elsewhere, freed], &names);
        assert_eq!((figures(found[0].own), figures(found[0].total)), ((100, 0), (100, 0)));
        assert_eq!((figures(found[1].own), figures(found[1].total)), ((30, -8), (30, -8)));
    }

    #[test]
    fn kernels_belong_to_the_operator_that_launched_them() {
        let names = named(&["outer", "inner", "kernel"]);
        let mut events = [operator(0, 0, 100), operator(1, 10, 20), Event::default(), Event::default()];
        (events[0].correlation, events[1].correlation) = (1, 2);
        for (event, (correlation, length)) in events[2..].iter_mut().zip([(2, 500), (1, 40)]) {
            *event = Event::new(EventKind::DeviceWork, 2, 300, length);
            event.correlation = correlation;
        }
        let found = operators(&events, &names);
        let device = |one: Figures| one.device_time.as_nanos();
        assert_eq!((device(found[0].own), device(found[0].total)), (40, 540));
        assert_eq!((device(found[1].own), device(found[1].total)), (500, 500));
    }

    #[test]
    fn a_child_that_seems_to_outlast_its_parent_is_cut() {
        let found = operators(&[operator(0, 0, 10), operator(1, 5, 12)], &named(&["outer", "inner"]));
        assert_eq!((figures(found[0].own).0, figures(found[1].own).0), (5, 5));
    }
}
