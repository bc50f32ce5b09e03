//! A test that measures the process is wrong as soon as another runs beside it. So in a binary where one does,
//! every test takes its turn: `serial()`.

use std::collections::BTreeMap;
use std::path::Path;

const MEASURES: [&str; 5] = ["resident()", "live()", "Limit::new", "uncounted()", "memory::stats"];

/// The files of tests by the binary they are compiled into.
fn binaries() -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::<String, Vec<String>>::new();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    for entry in Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").read_dir().unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_file() {
            found.entry(name).or_default().push(read(&path));
        } else if path.join("main.rs").is_file() {
            let files = path.read_dir().unwrap().map(|file| file.unwrap().path());
            let sources = files.filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
            found.entry(name).or_default().extend(sources.map(|file| read(&file)));
        }
    }
    found
}

/// The names of the tests in a file that take no turn.
fn beside_others(source: &str) -> impl Iterator<Item = &str> {
    let tests = source.split("#[test]\n").skip(1).filter(|test| !test.contains("serial()"));
    tests.map(|test| test.trim_start().split('(').next().unwrap_or_default())
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
    let source = "#[test]\nfn a() {\n    let _guard = serial();\n}\n\n#[test]\nfn b() {}\n";
    assert_eq!(beside_others(source).collect::<Vec<_>>(), ["fn b"]);
}
