//! A test that measures the process is wrong as soon as another runs beside it. So in a binary where one does,
//! every test takes its turn: `serial()`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const MEASURES: [&str; 15] = [
    "resident()",
    "anonymous()",
    "until_others",
    "live()",
    "uncounted()",
    "memory::stats",
    "stats(Device",
    "Limit::new",
    "FailAt",
    "PeakScope",
    "peak_of",
    "Recording",
    "LeakScope",
    "MemoryTimeline",
    "set_num_threads",
];

/// The files of tests by the binary they are compiled into.
fn binaries() -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::<String, Vec<String>>::new();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    // An editor's own files beside them are none of ours.
    let is_source = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.ends_with(".rs") && !name.starts_with('.')
    };
    for entry in Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").read_dir().unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if is_source(&path) {
            found.entry(name).or_default().push(read(&path));
        } else if path.join("main.rs").is_file() {
            let files = path.read_dir().unwrap().map(|file| file.unwrap().path());
            found.entry(name).or_default().extend(files.filter(is_source).map(|file| read(&file)));
        }
    }
    found
}

/// Whether a test takes its turn. It ends at a line that is a brace and nothing else, be it one of a macro.
fn takes_its_turn(test: &&str) -> bool {
    test.lines().take_while(|line| line.trim_end() != "}").any(|line| line.contains("serial()"))
}

/// The names of the tests in a file that take no turn.
fn beside_others(source: &str) -> impl Iterator<Item = &str> {
    let tests = source.split("#[test]\n").skip(1).filter(|test| !takes_its_turn(test));
    tests.map(|test| {
        let name = test.lines().find_map(|line| line.trim_start().strip_prefix("fn "));
        name.unwrap_or(test).split('(').next().unwrap_or_default()
    })
}

#[test]
fn where_one_test_measures_the_process_all_take_turns() {
    let measures = |source: &String| MEASURES.iter().any(|word| source.contains(word));
    let mut measured = 0;
    for (binary, sources) in binaries() {
        if binary == "turns.rs" || !sources.iter().any(measures) {
            continue;
        }
        measured += 1;
        let names: Vec<&str> = sources.iter().flat_map(|source| beside_others(source)).collect();
        assert!(names.is_empty(), "{binary}: {names:?} without serial()");
    }
    assert!(measured > 10, "the tests were found: {measured}");
}

#[test]
fn a_test_without_a_turn_is_found() {
    let source = "#[test]\nfn a() {\n    let _guard = serial();\n}\n\n#[test]\n#[cfg(x)]\nfn b() {\n}\nfn c() {\n    serial();\n}\n";
    assert_eq!(beside_others(source).collect::<Vec<_>>(), ["b"]);
}
