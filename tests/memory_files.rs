//! A timeline's files: right numbers, valid formats, names that stay text, a page that works.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use memfit::memory::{self, Phase, Recording, Role, Timeline};
use memfit::tch::{Device, Kind, Tensor};
use memfit::{Error, memory::Bytes};
use serde_json::Value;
use support::serial;
use support::waiting::until;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const HOSTILE: &str = "</script><img src=x onerror=alert(1)>\"',\u{1}\u{2028}\n=cmd";

/// One forward and backward over a million weights, in a segment of a given name.
fn step(segment: &str) -> Timeline {
    let w = Tensor::ones([1_000_000], CPU).set_requires_grad(true);
    let mut recording = Recording::start().unwrap();
    recording.label(Role::Parameters, [&w]);
    let loss = {
        let _in = Phase::Forward.enter_step(3);
        let _segment = memory::segment(segment);
        (w.exp() * 2.0).sum(Kind::Float)
    };
    {
        let _in = Phase::Backward.enter_step(3);
        loss.backward();
    }
    recording.label_gradients([&w]);
    recording.finish().unwrap()
}

const SHOWN: [Role; 4] = [Role::Parameters, Role::Activations, Role::Gradients, Role::Temporaries];

/// The part of the time in which a role held at least as much as the weights.
fn share(timeline: &Timeline, role: Role) -> f64 {
    let moments = timeline.moments();
    let ends = moments[1..].iter().map(|moment| moment.time).chain([timeline.length()]);
    let held = moments.iter().zip(ends).filter(|(moment, _)| moment.roles[role] >= 4_000_000);
    held.map(|(moment, end)| end - moment.time).sum::<Duration>().as_secs_f64()
        / timeline.length().as_secs_f64()
}

/// A step in which each role can be seen: time is what the pictures are drawn over, and a process that has to wait
/// at one place makes all others narrow.
fn wide_step(segment: &str) -> Timeline {
    let mut found = None;
    until("a step without a long wait", || {
        let timeline = step(segment);
        let wide = SHOWN.iter().all(|role| share(&timeline, *role) > 0.04);
        found = wide.then_some(timeline);
        wide
    });
    found.unwrap()
}

#[test]
fn the_trace_follows_the_trace_event_format() {
    let _guard = serial();
    let timeline = step(HOSTILE);
    let trace: Value = serde_json::from_str(&timeline.trace()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let kind = |event: &Value| event["ph"].as_str().unwrap().to_owned();
    for event in events {
        assert!(event["name"].is_string() && event["pid"].is_u64(), "{event}");
        match kind(event).as_str() {
            "M" => assert!(event["args"]["name"].is_string()),
            "X" => assert!(
                event["ts"].is_f64() && event["dur"].as_f64().unwrap() >= 0.0 && event["tid"].is_u64()
            ),
            "C" => assert!(
                event["ts"].is_f64() && event["args"].as_object().unwrap().values().all(Value::is_u64)
            ),
            "i" => assert!(event["ts"].is_f64() && event["s"] == "p"),
            other => panic!("{other}"),
        }
    }
    let counters: Vec<&Value> = events.iter().filter(|event| kind(event) == "C").collect();
    assert_eq!(counters.len(), timeline.moments().len());
    for (counter, moment) in counters.iter().zip(timeline.moments()) {
        let roles = counter["args"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap());
        assert_eq!(roles.sum::<u64>(), moment.live);
    }
    let slices: Vec<&Value> =
        events.iter().filter(|event| kind(event) == "X" && event["cat"] == "phase").collect();
    let names: Vec<&str> = slices.iter().map(|slice| slice["name"].as_str().unwrap()).collect();
    let mut phases = names.clone();
    phases.dedup();
    assert_eq!(phases, ["forward", "backward"]);
    assert!(events.iter().any(|event| event["cat"] == "segment" && event["name"] == HOSTILE));
}

/// Fields of one line of RFC 4180; quoted ones may hold line ends.
fn records(csv: &str) -> Vec<Vec<String>> {
    let (mut records, mut record, mut field, mut quoted) = (Vec::new(), Vec::new(), String::new(), false);
    let mut letters = csv.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => field.extend(letters.next()),
            '"' => quoted = !quoted,
            ',' if !quoted => record.push(std::mem::take(&mut field)),
            '\n' if !quoted => {
                record.push(std::mem::take(&mut field));
                records.push(std::mem::take(&mut record));
            }
            '\r' if !quoted => {}
            letter => field.push(letter),
        }
    }
    records
}

#[test]
fn the_table_has_a_line_per_event() {
    let _guard = serial();
    for (name, written) in [(HOSTILE, HOSTILE), ("=1+2", "'=1+2"), ("a,b", "a,b")] {
        let timeline = step(name);
        let records = records(&timeline.csv());
        assert_eq!(records[0].len(), 9 + Role::ALL.len());
        assert!(records.iter().all(|record| record.len() == records[0].len()));
        let number = |field: &String| field.parse::<u64>().unwrap();
        for record in &records[1..] {
            assert_eq!(number(&record[8]), record[9..].iter().map(number).sum::<u64>());
        }
        let exp = records.iter().find(|record| record[4] == "activations" && record[3] == "4000000").unwrap();
        assert_eq!((exp[1].as_str(), exp[5].as_str(), exp[6].as_str()), ("alloc", "forward", "3"));
        assert_eq!(exp[7], written);
        let events = timeline.blocks().iter().filter(|block| block.phase.is_some()).count();
        let of = |event: &str| records.iter().filter(|record| record[1] == event).count();
        assert_eq!(of("alloc"), events);
        // Made in forward, freed in backward.
        let freed = records.iter().find(|record| record[1] == "free" && record[2] == exp[2]).unwrap();
        assert_eq!((freed[5].as_str(), freed[7].as_str()), ("backward", ""));
    }
}

#[test]
fn refused_requests_have_a_line_in_the_table_and_a_mark_in_the_trace() {
    let _guard = serial();
    let recording = Recording::start().unwrap();
    let limit = memfit::memory::Limit::new(support::live() + 10).unwrap();
    {
        let _in = Phase::Forward.enter_step(2);
        assert!(Tensor::f_zeros([1000], (Kind::Float, memfit::tch::Device::Cpu)).is_err());
    }
    drop(limit);
    let timeline = recording.finish().unwrap();
    let records = records(&timeline.csv());
    let refused = records.iter().find(|record| record[1] == "refused").unwrap();
    assert_eq!((refused[3].as_str(), refused[5].as_str(), refused[6].as_str()), ("4000", "forward", "2"));
    assert_eq!(refused[8], support::live().to_string());
    assert_eq!(refused.len(), records[0].len());
    let trace: Value = serde_json::from_str(&timeline.trace()).unwrap();
    let marks =
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "out of memory");
    assert_eq!(
        marks.map(|event| event["args"]["bytes asked for"].as_u64()).collect::<Vec<_>>(),
        [Some(4000)]
    );
}

#[test]
fn the_chart_names_axes_units_roles_phases_and_the_peak() {
    let _guard = serial();
    let timeline = step("exponential");
    let svg = timeline.svg();
    let peak = Bytes(timeline.peak().bytes).to_string();
    for text in
        ["parameters", "activations", "gradients", "temporaries", "forward", "backward", "MB<", "together"]
    {
        assert!(svg.contains(text), "{text}");
    }
    assert!(svg.contains(&format!("peak {peak}")), "{svg}");
    assert!(svg.contains("Memory over training step 3"));
    assert!(svg.contains(">time since the timeline"));
    // 16 MB at the peak, of which one million fp32 each.
    let quarter = svg.matches(">4.0 MB<").count();
    assert!(quarter >= 3, "{quarter}");
}

#[test]
fn a_hostile_name_stays_text_in_every_file() {
    let _guard = serial();
    let timeline = step(HOSTILE);
    let svg = timeline.svg();
    let html = timeline.html();
    assert!(!svg.contains("<img") && !svg.contains('\u{1}'));
    assert!(!html.contains("<img") && !html.contains('\u{2028}'));
    assert_eq!(html.matches("</script>").count(), 2, "the data's and the code's");
    // Every angle bracket of the chart begins an element that it is made of.
    let known = ["svg", "title", "rect", "line", "path", "circle", "text"];
    for tag in svg.split('<').skip(1) {
        let tag = tag.trim_start_matches('/');
        assert!(known.iter().any(|known| tag.starts_with(known)), "<{tag}");
    }
}

#[test]
fn the_image_is_a_png_with_sums_that_hold() {
    let _guard = serial();
    let png = step("exponential").png().unwrap();
    assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
    let number = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
    assert_eq!((number(16), number(20)), (1280, 720));
    let (mut at, mut kinds) = (8, Vec::new());
    while at < png.len() {
        let length = number(at) as usize;
        let body = &png[at + 4..at + 8 + length];
        // CRC-32 as the PNG specification's appendix computes it.
        let sum = body.iter().fold(u32::MAX, |sum, byte| {
            (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
                if sum & 1 == 1 { 0xedb8_8320 ^ (sum >> 1) } else { sum >> 1 }
            })
        });
        assert_eq!(number(at + 8 + length), !sum);
        kinds.push(String::from_utf8_lossy(&body[..4]).into_owned());
        at += 12 + length;
    }
    assert_eq!(kinds, ["IHDR", "IDAT", "IEND"]);
}

/// The picture is not empty: each role that held bytes has its colour, in as many points as its
/// share of the plot says.
#[test]
fn the_image_shows_each_role() {
    let _guard = serial();
    let png = wide_step("exponential").png().unwrap();
    let length = u32::from_be_bytes(png[33..37].try_into().unwrap()) as usize;
    assert_eq!(&png[37..41], b"IDAT");
    let lines = miniz_oxide::inflate::decompress_to_vec_zlib(&png[41..41 + length]).unwrap();
    assert_eq!(png[25], 2, "three bytes a point");
    assert_eq!(lines.len(), 720 * (1 + 3 * 1280));
    let unfiltered = lines.chunks(1 + 3 * 1280);
    assert!(unfiltered.clone().all(|line| line[0] == 0), "no filter");
    let count = |color: [u8; 3]| -> usize {
        let points = unfiltered.clone().flat_map(|line| line[1..].chunks(3));
        points.filter(|point| *point == color).count()
    };
    // Parameters, activations, gradients, temporaries.
    for color in [[0x00, 0x72, 0xb2], [0x00, 0x9e, 0x73], [0xd5, 0x5e, 0x00], [0xe6, 0x9f, 0x00]] {
        assert!(count(color) > 2_000, "{color:?}: {}", count(color));
    }
}

#[test]
fn files_are_written_by_their_ending() {
    let _guard = serial();
    let timeline = step("exponential");
    let folder = tempfile::tempdir().unwrap();
    for ending in ["svg", "png", "html", "json", "csv", "SVG"] {
        let path = folder.path().join("step").with_extension(ending);
        std::fs::write(&path, "what was there").unwrap();
        timeline.save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let begins = match ending {
            "svg" | "SVG" => "<svg",
            "html" => "<!doctype html>",
            "json" => "{",
            "csv" => "time_us,",
            _ => {
                assert_eq!(bytes, timeline.png().unwrap());
                continue;
            }
        };
        assert!(bytes.starts_with(begins.as_bytes()), "{ending}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 6, "nothing else is left there");
    assert!(matches!(timeline.save(folder.path().join("step.pdf")), Err(Error::Config { .. })));
    assert!(matches!(timeline.save(folder.path().join("absent/step.svg")), Err(Error::Io { .. })));
}

#[test]
fn an_empty_timeline_has_files_too() {
    let _guard = serial();
    let timeline = Recording::start().unwrap().finish().unwrap();
    assert_eq!(timeline.peak().bytes, support::live());
    assert!(timeline.svg().contains("Memory over time") && timeline.png().is_ok());
    assert!(serde_json::from_str::<Value>(&timeline.trace()).is_ok());
    assert!(timeline.html().contains("Memory over time"));
}

fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell"];
    let places = std::env::split_paths(&path).flat_map(|folder| names.map(|name| folder.join(name)));
    places.into_iter().find(|place| place.is_file())
}

/// What a page consists of once its scripts have run.
fn dom(chromium: &Path, page: &Path, profile: &Path) -> std::io::Result<String> {
    let output = Command::new(chromium)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1400,900",
        ])
        .args(["--virtual-time-budget=3000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", page.display()))
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Hovers over the peak, drags to zoom, presses a key, and writes what the page shows.
const HAND: &str = r#"<script>
window.addEventListener("error", event => document.title = "error: " + event.message);
window.addEventListener("load", () => {
  const seen = {}, text = id => document.getElementById(id).innerText;
  const rect = canvas.getBoundingClientRect(), x = time => LEFT + time / data.length * (rect.width - LEFT - RIGHT);
  const mouse = (kind, left, target) => (target || canvas).dispatchEvent(
    new MouseEvent(kind, { clientX: rect.left + left, clientY: rect.top + 100, bubbles: true }));
  seen.start = text("moment");
  mouse("mousemove", x(0) + 1); seen.first = text("moment"); seen.firstRoles = text("roles");
  mouse("mousemove", x(data.times[data.peak]) + 0.5); seen.peakRoles = text("roles"); seen.holders = text("holders");
  const middle = data.length / 2;
  mouse("mousedown", x(middle)); mouse("mousemove", x(data.length)); mouse("mouseup", x(data.length), window);
  seen.zoomed = view[0] / data.length; seen.end = view[1] / data.length;
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, clientX: rect.left + 300, clientY: rect.top + 9, cancelable: true }));
  seen.closer = (view[1] - view[0]) / data.length;
  document.getElementById("whole").click(); seen.whole = view[1] - view[0] === data.length;
  document.getElementById("to-peak").click();
  const before = at; canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", cancelable: true })); seen.moved = before - at;
  const painted = pen.getImageData(0, 0, canvas.width, canvas.height).data, colors = new Set();
  for (let i = 0; i < painted.length; i += 4) colors.add(painted[i] * 65536 + painted[i + 1] * 256 + painted[i + 2]);
  seen.painted = data.roles.filter(role => colors.has(parseInt(role[1].slice(1), 16))).map(role => role[0]);
  const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script>"#;

#[test]
fn the_page_tells_on_hover_and_zooms() {
    let _guard = serial();
    let Some(chromium) = chromium() else {
        println!("skipped: no Chromium on PATH");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let shown = |content: &str| {
        std::fs::write(&page, content).unwrap();
        dom(&chromium, &page, &folder.path().join("profile"))
    };
    let script = "<script>document.body.append(6 * 7)</script>";
    match shown(&format!("<!doctype html><meta charset=utf-8><body>{script}</body>")) {
        Ok(dom) if dom.contains("</script>42") => {}
        other => {
            println!(
                "skipped: {} shows no page of {}: {other:?}",
                chromium.display(),
                folder.path().display()
            );
            return;
        }
    }
    let timeline = wide_step(HOSTILE);
    let dom = shown(&timeline.html().replace("</body>", &format!("{HAND}</body>"))).unwrap();
    let Some((_, seen)) = dom.split_once("<pre id=\"seen\">") else { panic!("{dom}") };
    let seen = seen.split("</pre>").next().unwrap();
    let seen = seen.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", " ").replace("&amp;", "&");
    let seen: Value = serde_json::from_str(&seen).unwrap_or_else(|error| panic!("{error}: {seen}"));
    let text = |key: &str| seen[key].as_str().unwrap_or_default().to_owned();
    assert!(text("start").contains("backward of step 3") && text("start").contains("(the peak)"), "{seen}");
    assert!(
        !text("first").contains("(the peak)") && !text("firstRoles").contains("4.00 MB\nactivations"),
        "{seen}"
    );
    for role in ["parameters\t4.00 MB", "gradients\t4.00 MB", "activations\t4.00 MB", "temporaries\t4.00 MB"]
    {
        assert!(text("peakRoles").contains(role), "{role} in {seen}");
    }
    assert!(text("holders").contains("onerror=alert(1)"), "the name is text: {seen}");
    assert!((seen["zoomed"].as_f64().unwrap() - 0.5).abs() < 0.01, "{seen}");
    assert!(seen["end"].as_f64().unwrap() > 0.99 && seen["closer"].as_f64().unwrap() < 0.45, "{seen}");
    assert_eq!((&seen["whole"], &seen["moved"]), (&Value::Bool(true), &Value::from(1)), "{seen}");
    let painted = seen["painted"].as_array().unwrap();
    for role in ["parameters", "gradients", "activations", "temporaries"] {
        assert!(painted.iter().any(|found| found == role), "{role} in {seen}");
    }
}

/// Writes all files into the folder that MEMFIT_FILES names, to be looked at.
#[test]
#[ignore = "for looking at"]
fn files_to_look_at() {
    let _guard = serial();
    let folder = PathBuf::from(std::env::var_os("MEMFIT_FILES").unwrap());
    for (name, timeline) in [("small", step("exponential")), ("hostile", step(HOSTILE))] {
        for ending in ["svg", "png", "html", "json", "csv"] {
            timeline.save(folder.join(name).with_extension(ending)).unwrap();
        }
    }
}
