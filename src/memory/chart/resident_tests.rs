use super::*;

fn line(seconds: f64, anonymous: u64, live: u64) -> String {
    format!(
        "{{\"seconds\":{seconds},\"unix_seconds\":1.5,\"devices\":[{{\"device\":\"cpu\",\"live\":{live},\"peak\":9,\
         \"reserved\":9}}],\"resident\":{{\"anonymous\":{anonymous},\"file\":300,\"shared\":0}},\"ram_total\":null}}\n"
    )
}

fn chart(text: &str) -> Result<ResidentChart> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.jsonl");
    std::fs::write(&path, text).unwrap();
    ResidentChart::new("title").run_of_file("run", path)
}

#[test]
fn the_last_run_of_a_file_is_drawn_from_its_first_moment() {
    let text = [line(0.0, 1, 1), line(9.0, 1, 1), line(0.5, 100, 10), line(1.0, 200, 20)].concat();
    let chart = chart(&text).unwrap();
    let moment = |time, anonymous, live| Moment { time, bytes: [Some(300.0), Some(anonymous), Some(live)] };
    assert_eq!(chart.runs[0].moments, [moment(0.0, 100.0, 10.0), moment(0.5, 200.0, 20.0)]);
}

#[test]
fn a_run_that_begins_at_the_time_at_which_another_ended_is_another() {
    let chart = chart(&[line(0.0, 1, 1), line(0.0, 100, 10), line(1.0, 200, 20)].concat()).unwrap();
    let times: Vec<f64> = chart.runs[0].moments.iter().map(|moment| moment.time).collect();
    assert_eq!(times, [0.0, 1.0]);
    assert_eq!(chart.runs[0].moments[0].bytes[1], Some(100.0));
}

#[test]
fn a_torn_line_is_passed_over_and_an_alien_file_is_not() {
    let text = [&line(0.0, 1, 1), "{\"seconds\":0.5,\"dev\n", &line(1.0, 2, 2), "{\"seconds\":1.5"].concat();
    assert_eq!(chart(&text).unwrap().runs[0].moments.len(), 2);
    for (alien, at) in
        [("a,b\n1,2\n", "record 0 at byte 0 of "), ("", "the data of "), ("\u{0}", "record 0 ")]
    {
        let error = chart(alien).unwrap_err().to_string();
        assert!(error.contains(at) && error.contains("no line of a monitor"), "{error}");
    }
    assert!(matches!(ResidentChart::new("t").run_of_file("r", "/no/such"), Err(Error::Io { .. })));
    assert!(matches!(ResidentChart::new("t").run_of_file("r", "/"), Err(Error::Io { .. })));
}

#[test]
fn curves_stand_where_their_bytes_and_times_say() {
    // The grid ends at 100 MB: 1 MB is a hundredth of the plot's 344 points above 460.
    let text = [line(0.0, 0, 0), line(1.0, 92_000_000, 23_000_000)].concat();
    let svg = chart(&text).unwrap().budget(50_000_000).svg();
    assert!(svg.contains("M96.0 460.0L1256.0 143.5\""), "{svg}");
    assert!(svg.contains("M96.0 460.0L1256.0 380.9\""), "{svg}");
    assert!(
        svg.contains(
            "x1=\"96.0\" y1=\"288.0\" x2=\"1256.0\" y2=\"288.0\" stroke=\"#222222\" stroke-dasharray"
        )
    );
    for text in ["budget 50.0 MB", ">100 MB<", "anonymous at most 92.0 MB", "time, ms", "pages of files"] {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn runs_have_one_scale_of_time() {
    let folder = tempfile::tempdir().unwrap();
    let mut chart = ResidentChart::new("title");
    for (name, seconds) in [("short", 1.0), ("long", 4.0)] {
        let path = folder.path().join(name);
        std::fs::write(&path, [line(0.0, 0, 0), line(seconds, 92_000_000, 0)].concat()).unwrap();
        chart = chart.run_of_file(name, path).unwrap();
    }
    let svg = chart.svg();
    // Two panels of 562 points: the short run ends at a quarter of the first one.
    assert!(svg.contains("M96.0 460.0L236.5 143.5\""), "{svg}");
    assert!(svg.contains("M694.0 460.0L1256.0 143.5\""), "{svg}");
    assert!(svg.contains("time, s") && !svg.contains("time, ms"), "{svg}");
}

#[test]
fn one_moment_is_seen() {
    let svg = chart(&line(0.0, 92_000_000, 0)).unwrap().svg();
    assert!(svg.contains("cx=\"96.0\" cy=\"143.5\""), "{svg}");
}

#[test]
fn above_the_start_nothing_is_below_zero() {
    let text = [line(0.0, 50_000_000, 0), line(1.0, 10_000_000, 0), line(2.0, 80_000_000, 0)].concat();
    let svg = chart(&text).unwrap().above_start().svg();
    assert!(svg.contains("anonymous at most 30.0 MB"), "{svg}");
    assert!(svg.contains("M96.0 460.0L676.0 460.0L1256.0"), "{svg}");
}

#[test]
fn thousands_of_moments_are_two_a_column_and_lose_no_peak() {
    let lines = (0..20_000).map(|at| line(f64::from(at), if at == 12_345 { 700_000_000 } else { 1 }, 1));
    let svg = chart(&lines.collect::<String>()).unwrap().svg();
    assert!(svg.len() < 150_000, "{}", svg.len());
    assert!(svg.contains("anonymous at most 700.0 MB"));
    assert!(svg.matches(" 159.0").count() > 0, "700 of 800 MB: {svg}");
}

#[test]
fn empty_charts_and_hostile_names_are_pictures() {
    let empty = ResidentChart::new("<script>").run("a\u{1}<b>", &[]);
    let svg = empty.svg();
    assert!(!svg.contains("<script>") && !svg.contains("<b>") && !svg.contains('\u{1}'));
    assert!(empty.png().unwrap().starts_with(b"\x89PNG"));
    assert!(ResidentChart::new("none").budget(u64::MAX).svg().ends_with("</svg>\n"));
    let many = (0..40).fold(ResidentChart::new("many"), |chart, run| chart.run(run.to_string(), &[]));
    assert!(many.png().is_ok());
    assert!(matches!(empty.save("a.pdf"), Err(Error::Config { .. })));
    assert!(matches!(empty.save("/no/such/folder/a.svg"), Err(Error::Io { .. })));
}
