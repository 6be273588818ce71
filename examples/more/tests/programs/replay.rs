//! The program `replay`: known logs, and exact numbers.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::Path,
    process::{Command, Output, Stdio},
    sync::OnceLock,
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use tempfile::TempDir;

use crate::support;

#[path = "replay/formats.rs"]
mod formats;

/// Three requests of one client in each of four seconds.
const TIMES: [u64; 12] = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3];
/// 2026-03-02 08:00:00 UTC.
pub const START: u64 = 1_772_438_400;

fn program() -> Command {
    static PATH: OnceLock<std::path::PathBuf> = OnceLock::new();
    Command::new(PATH.get_or_init(|| support::example("replay")))
}

fn run(args: &[&str]) -> (String, String) {
    let Output { status, stdout, stderr } = program().args(args).output().unwrap();
    let errors = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "{args:?}: {errors}");
    (String::from_utf8(stdout).unwrap(), errors)
}

fn write(folder: &TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn common(time: u64, address: &str) -> String {
    let (minute, second) = (time / 60 % 60, time % 60);
    let stamp = format!("02/Mar/2026:10:{minute:02}:{second:02} +0200");
    format!("{address} - - [{stamp}] \"GET /a?b=1 HTTP/1.1\" 200 7 \"-\" \"curl\"\n")
}

fn known_log() -> String {
    TIMES.map(|time| common(time, "203.0.113.7")).concat()
}

/// The rows of the table of limits: algorithm and numbers.
fn rows(report: &str) -> Vec<Vec<String>> {
    let table = report.split("\n\n").find(|part| part.starts_with("quota")).expect("a table");
    let names = ["fixed-window", "sliding-window", "sliding-log", "token-bucket", "leaky-bucket"];
    let rows = table.lines().filter_map(|line| {
        let words: Vec<_> = line.split("  ").map(str::trim).filter(|it| !it.is_empty()).collect();
        let start = words.iter().position(|word| names.contains(word))?;
        Some(words[start..].iter().map(|word| (*word).to_owned()).collect())
    });
    rows.collect()
}

#[test]
fn each_algorithm_denies_what_it_would_have_denied() {
    let folder = tempfile::tempdir().unwrap();
    let log = write(&folder, "access.log", &known_log());
    let (report, _) = run(&[&log, "--quota", "4/2s", "--no-spread"]);
    assert!(report.starts_with(
        "12 requests of 1 key, 2026-03-02 08:00:00 to 2026-03-02 08:00:03 UTC\n\
         peak: 3 requests in the second 2026-03-02 08:00:00\n"
    ));
    let expected = [
        "fixed-window|4|33.3 %|1|100.0 %|0|-|-",
        // The window before counts in full at 2 s, and by half at 3 s.
        "sliding-window|6|50.0 %|1|100.0 %|0|-|-",
        "sliding-log|4|33.3 %|1|100.0 %|0|-|-",
        "token-bucket|2|16.7 %|1|100.0 %|0|-|-",
        // 0.5 1.0 | 0.5 1.0 1.5 | 1.0 1.5 | 1.0 1.5
        "leaky-bucket|2|16.7 %|1|100.0 %|9|1.0 s|1.5 s",
    ];
    assert_eq!(rows(&report).iter().map(|row| row.join("|")).collect::<Vec<_>>(), expected);
    let top: Vec<_> = report.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(top, ["ip=203.0.113.7", "4", "0", "12", "3", "12", "12"]);
}

#[test]
fn the_limit_to_begin_with_denies_no_key_below_its_peak() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/replay/sample.log.gz");
    let (report, _) = run(&[sample]);
    let (_, flags) = report.split_once("to begin with, try ").unwrap();
    let flags: Vec<_> = flags.lines().next().unwrap().split(' ').collect();
    assert_eq!(flags, ["--quota", "240/min", "--algorithm", "token-bucket"]);
    assert!(report.contains("algorithm = \"token-bucket\", quota = \"240/min\"\n"), "{report}");
    let (report, _) = run(&[&[sample][..], &flags].concat());
    assert_eq!(rows(&report)[0][3], "1", "{report}"); // of 154 keys

    let folder = tempfile::tempdir().unwrap();
    let lines = [[59; 7], [60; 7]].concat().into_iter().map(|time| common(time, "203.0.113.7"));
    let log = write(&folder, "access.log", &lines.collect::<String>());
    let (report, _) =
        run(&[&log, "--quota", "14/min", "--algorithm", "token-bucket", "--no-spread"]);
    assert_eq!(rows(&report)[0][1], "0", "{report}");
    assert!(run(&[&log]).0.contains("--quota 14/min"));
}

#[test]
fn the_lists_of_keys_contain_their_peaks() {
    let folder = tempfile::tempdir().unwrap();
    let mut lines = TIMES.map(|time| common(time, "203.0.113.7")).to_vec();
    lines.extend([60, 3_540].map(|time| common(time, "203.0.113.7")));
    lines.push(common(3_540, "203.0.113.8"));
    let log = write(&folder, "access.log", &lines.concat());
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let (report, _) = run(&[&log]);
    let list = report.split("\n\n").find(|part| part.starts_with("busiest keys")).unwrap();
    let rows: Vec<_> = list.lines().map(words).collect();
    assert_eq!(rows[0], ["busiest", "keys", "requests", "peak/s", "peak/min", "peak/h"]);
    assert_eq!(rows[1], ["ip=203.0.113.7", "14", "3", "12", "14"]);
    assert_eq!(rows[2], ["ip=203.0.113.8", "1", "1", "1", "1"]);
    let (report, _) = run(&[&log, "--quota", "4/2s", "--algorithm", "sliding-log"]);
    let row = words(report.lines().last().unwrap());
    assert_eq!(row, ["ip=203.0.113.7", "4", "0", "14", "3", "12", "14"]);
}

#[test]
fn keys_are_listed_as_delayed_only_if_none_is_denied() {
    let folder = tempfile::tempdir().unwrap();
    let log = write(&folder, "access.log", &known_log());
    let flags = ["--quota", "4/2s", "--no-spread"];
    let waits = ["--max-wait", "60", "--algorithm", "token-bucket"];
    let (report, _) = run(&[&[&*log], &flags[..], &waits].concat());
    assert!(report.contains("\nkeys that 4/2s token-bucket delays most"), "{report}");
    // The other key only waits.
    let others = [common(0, "203.0.113.8"), common(0, "203.0.113.8"), known_log()].concat();
    let log = write(&folder, "two.log", &others);
    let (report, _) = run(&[&[&*log], &flags[..], &["--algorithm", "leaky-bucket"]].concat());
    let list = report.split("\n\n").last().unwrap();
    assert!(list.starts_with("keys that 4/2s leaky-bucket denies most"), "{report}");
    assert!(list.contains("203.0.113.7") && !list.contains("203.0.113.8"), "{report}");
}

#[test]
fn only_some_requests_are_tried_at_the_times_that_they_have_in_the_whole_log() {
    let folder = tempfile::tempdir().unwrap();
    let other = |time| common(time, "2001:db8::7").replace("/a?b=1", "/b/1?c");
    let lines = TIMES.map(|time| [common(time, "203.0.113.7"), other(time)].concat());
    let log = write(&folder, "access.log", &lines.concat());
    // 333 ms apart, and 167 ms after each whole second.
    let flags = ["--quota", "3/s burst 1", "--algorithm", "token-bucket"];
    let with = |only: &[&str]| run(&[&[&*log], &flags[..], only].concat()).0;
    let row = |report: &str| {
        let row = report.lines().last().unwrap();
        row.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let all = with(&[]);
    for (only, key) in [
        ("ip=203.0.113.7", "ip=203.0.113.7"),
        ("ip=203.0.*", "ip=203.0.113.7"),
        ("path=/a", "ip=203.0.113.7"),
        ("ip=2001:db8::1", "ip=2001:db8::/64"),
        ("ip=2001:db8::/64", "ip=2001:db8::/64"),
        ("path=/b/*", "ip=2001:db8::/64"),
    ] {
        let report = with(&["--only", only]);
        assert!(report.starts_with("12 requests of 1 key, "), "{report}");
        assert!(report.contains(&format!("\nonly {only}: 12 of 24 requests\n")), "{report}");
        let expected = all.lines().find(|line| line.trim_start().starts_with(key)).unwrap();
        assert_eq!(row(&report), row(expected), "{only}");
    }
    let (report, _) = run(&[&log, "--only", "path=/a", "--only", "status=200", "--quota", "1/h"]);
    assert!(report.contains("\nonly path=/a, status=200: 12 of 24 requests\n"), "{report}");

    // Fields that some lines do not have.
    let json = "{\"ts\":1772438400,\"ip\":\"203.0.113.7\"}\n";
    let named = json.replace("}", ",\"user\":{\"id\":7}}");
    let log = write(&folder, "a.json", &[json, &*named, json, &*named, json].concat());
    let (report, _) = run(&[&log, "--only", "user.id=7", "--quota", "1/h"]);
    assert!(report.contains("\nonly user.id=7: 2 of 5 requests\n"), "{report}");
}

#[test]
fn files_are_merged_by_time() {
    let folder = tempfile::tempdir().unwrap();
    let address = |number: usize| ["203.0.113.7", "203.0.113.8"][number % 2];
    let lines: Vec<_> = (0..2_400).map(|it| common(it as u64 / 8, address(it / 2))).collect();
    let whole = write(&folder, "whole.log", &lines.concat());
    let part = |rest: usize| {
        let part = lines.iter().enumerate().filter(|(number, _)| number % 2 == rest);
        part.map(|(_, line)| &**line).collect::<String>()
    };
    let (one, two) = (write(&folder, "1.log", &part(0)), write(&folder, "2.log", &part(1)));
    let flags = ["--quota", "3/s burst 1", "--quota", "100/min"];
    let expected = run(&[&[&*whole], &flags[..]].concat()).0;
    for files in [[&*one, &*two], [&two, &one]] {
        assert_eq!(run(&[&files[..], &flags[..]].concat()).0, expected);
    }
    // Files of one time after the other, in any order; a wrong stamp does not keep a file back.
    let early = write(&folder, "early.log", &lines[..600].concat());
    let stray = common(0, "203.0.113.7").replace("2026", "2099");
    let late = [&*lines[600..900].concat(), &stray, &*lines[900..].concat()].concat();
    let late = write(&folder, "late.log", &late);
    let (report, _) = run(&[&[&*late, &*early], &flags[..]].concat());
    assert!(report.contains("\nstray lines: 1 ") && !report.contains("late lines"), "{report}");
    assert_eq!(rows(&report), rows(&expected));
}

#[test]
fn requests_wait_instead_of_being_denied() {
    let folder = tempfile::tempdir().unwrap();
    let log = write(&folder, "access.log", &known_log());
    let flags = ["--quota", "4/2s", "--no-spread", "--max-wait", "60", "--algorithm"];
    let (report, _) = run(&[&[&*log], &flags[..], &["token-bucket"]].concat());
    // The bucket is 1 short at 2 s, and 2 short at 3 s: 0.5 s | 0.5 s 1.0 s.
    assert_eq!(rows(&report)[0].join("|"), "token-bucket|0|0 %|0|0 %|3|500 ms|1.0 s");
}

#[test]
fn whole_seconds_are_spread_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let log = write(&folder, "access.log", &known_log());
    let flags = ["--quota", "3/s burst 1", "--algorithm", "token-bucket"];
    let (report, _) = run(&[&[&*log], &flags[..]].concat());
    // 333,333 us apart: each but the first of a second is up to 1 us early, and is denied.
    assert_eq!(rows(&report)[0][1], "4", "{report}");
    let (report, _) = run(&[&[&*log], &flags[..], &["--no-spread"]].concat());
    assert_eq!(rows(&report)[0][1], "8", "{report}");
}

#[test]
fn all_formats_are_the_same_traffic() {
    let folder = tempfile::tempdir().unwrap();
    let common = known_log();
    let json = TIMES.map(|time| {
        let time = START + time;
        format!(
            "{{\"level\":\"info\",\"request\":{{\"client_ip\":\"203.0.113.7\"}},\"ts\":{time}}}\n"
        )
    });
    let csv =
        TIMES.map(|time| format!("\"a \"\"b\"\", c\",2026-03-02 08:00:0{time},203.0.113.7\r\n"));
    let csv = ["agent,when,address\r\n", &csv.concat()].concat();
    // The comma of the first column is in quotes.
    let semicolons = csv.replace(',', ";").replace("\"; c", "\", c");
    let mut gz = GzEncoder::new(vec![], Compression::fast());
    gz.write_all(common.as_bytes()).unwrap();
    let gz_file = folder.path().join("access.log.gz");
    fs::write(&gz_file, gz.finish().unwrap()).unwrap();

    let flags = ["--quota", "4/2s", "--no-spread"];
    let logs = [
        vec![write(&folder, "access.log", &common)],
        vec![write(&folder, "access.json", &json.concat())],
        [write(&folder, "a.csv", &csv)]
            .into_iter()
            .chain(["--time", "when", "--ip", "address"].map(String::from))
            .collect(),
        [write(&folder, "b.csv", &semicolons)]
            .into_iter()
            .chain(["--time", "when", "--ip", "address"].map(String::from))
            .collect(),
        vec![gz_file.to_str().unwrap().to_owned()],
    ];
    let reports = logs.map(|log| {
        let args: Vec<_> = log.iter().map(String::as_str).chain(flags).collect();
        run(&args).0
    });
    assert!(reports.iter().all(|report| *report == reports[0]), "{reports:#?}");

    let mut process = program();
    process.arg("-").args(flags).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = process.spawn().unwrap();
    process.stdin.take().unwrap().write_all(common.as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), reports[0]);
}

#[test]
fn a_key_can_be_any_fields() {
    let folder = tempfile::tempdir().unwrap();
    let log = write(&folder, "access.log", &known_log());
    for (fields, key) in [
        ("path", "path=/a"),
        ("ip,path", "ip=203.0.113.7|path=/a"),
        ("agent", "agent=curl"),
        ("status", "status=200"),
    ] {
        let (report, _) = run(&[&log, "--key", fields, "--quota", "1/h"]);
        assert!(report.lines().last().unwrap().starts_with(&format!("  {key} ")), "{report}");
    }
    let log = write(&folder, "v6.log", &common(0, "2001:db8::7").repeat(2));
    let (report, _) = run(&[&log, "--quota", "1/h"]);
    assert!(report.contains("  ip=2001:db8::/64  "), "{report}");
}

#[test]
fn bad_lines_are_counted_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(3 << 20);
    let lines = [
        "no log\n",
        &common(0, "203.0.113.7"),
        "\u{1b}[31m red\n",
        &long,
        "\n",
        &common(0, "-"),
        "\n",
        &common(1, "203.0.113.7"),
        "203.0.113.7 - - [99/Mar/2026:10:00:00 +0000] \"GET / HTTP/1.1\" 200 7\n",
        "cut off",
    ];
    let log = write(&folder, "access.log", &lines.concat());
    let (report, _) = run(&[&log]);
    assert!(report.starts_with("2 requests of 1 key"), "{report}");
    let reasons = "(1 longer than 1 MiB, 3 not in the format, 1 without a time stamp, \
                   1 without an address of a client)";
    assert!(report.contains(&format!("bad lines: 6 of 9 {reasons}\n")), "{report}");
    assert!(report.contains(&format!("{log}:1: not in the format: no log\n")), "{report}");
    assert!(!report.contains('\u{1b}'), "{report}");
}

#[test]
fn lines_out_of_order_are_sorted_and_wrong_stamps_do_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let mut lines: Vec<_> = TIMES.map(|time| common(time, "203.0.113.7")).to_vec();
    lines.reverse();
    // More than a day ahead of all others.
    lines.insert(3, common(0, "203.0.113.7").replace("2026", "2099"));
    let log = write(&folder, "access.log", &lines.concat());
    let (report, _) = run(&[&log, "--quota", "4/2s", "--no-spread"]);
    assert!(report.contains("stray lines: 1 "), "{report}");
    let denied: Vec<_> = rows(&report).iter().map(|row| row[1].clone()).collect();
    assert_eq!(denied, ["4", "6", "4", "2", "2"]);

    let late = [common(300, "203.0.113.7"), common(0, "203.0.113.7")].concat();
    let (report, _) = run(&[&write(&folder, "late.log", &late)]);
    let peak = report.find("\npeak: ").unwrap();
    assert!(report.find("\nlate lines: 1 ").is_some_and(|late| late < peak), "{report}");
}

#[test]
fn memory_is_bounded_and_the_report_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let address = |number: u64| format!("10.1.{}.{}", number / 250, number % 250);
    let mut lines: Vec<_> = (0..20_000).map(|it| common(it / 10, &address(it))).collect();
    lines.extend((2_000..2_010).map(|second| common(second, "203.0.113.7").repeat(100)));
    let log = write(&folder, "access.log", &lines.concat());
    let flags = ["--max-keys", "500", "--quota", "10/h", "--algorithm", "token-bucket"];
    let (report, _) = run(&[&[&*log], &flags[..]].concat());
    let keys = report.split("requests of about ").nth(1).expect("an estimate");
    let keys: u64 = keys.split(' ').next().unwrap().replace(',', "").parse().unwrap();
    assert!((19_400..=20_600).contains(&keys), "{report}");
    assert!(report.contains("(about: there are more keys than --max-keys)"), "{report}");
    assert!(report.contains("more keys than --max-keys were in use at once"), "{report}");
    // The client that suffers is found nevertheless.
    let top: Vec<_> = report.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(top, ["ip=203.0.113.7", "990", "0", "1,000", "100", "1,000", "1,000"]);
}

#[test]
fn a_mistake_names_the_flag_and_what_to_write() {
    let folder = tempfile::tempdir().unwrap();
    let json = write(&folder, "a.json", "{\"at\": 1772438400, \"who\": {\"id\": \"k1\"}}\n");
    let csv = write(&folder, "a.csv", "time,who\n1772438400,k1\n");
    let log = write(&folder, "access.log", &known_log());
    let (empty, none) = (write(&folder, "empty", ""), write(&folder, "none", "no log\n"));
    for (args, parts) in [
        (&[&*json][..], &["--time: ", "at, who.id"][..]),
        (&[&csv], &["--ip: ", "address", "time, who"]),
        (&[&csv, "--ip", "remote"], &["--ip: ", "\"remote\"", "time, who", "first line"]),
        (&[&csv, "--time", "when"], &["--time: ", "\"when\"", "time, who"]),
        (&[&csv, "--key", "user"], &["--key: ", "\"user\"", "time, who"]),
        (&[&csv, "--key", "who", "--only", "path=/a"], &["--only: ", "\"path\"", "time, who"]),
        (&[&csv, "--key", "who", "--only", "who=k2"], &["--only who=k2: none of 1 request"]),
        (&[&log, "--only", "path"], &["--only", "path=/login"]),
        (&[&log, "--only", "foo=1"], &["--only: ", "\"foo\"", "ip, user"]),
        (&[&log, "--key", "foo"], &["--key: ", "\"foo\"", "ip, user"]),
        (&[&log, "--time", "foo"], &["--time: ", "\"foo\"", "ip, user, time"]),
        (&[&log, "--ip", "foo"], &["--ip: ", "\"foo\"", "ip, user"]),
        (&[&empty], &["the logs are empty"]),
        (&[&none], &["no line is a request", "--format"]),
        (&[&log, "--quota", "many"], &["--quota", "10/s"]),
        (&[&log, "--quota", "1/s burst 5", "--algorithm", "sliding-log"], &["--quota: "]),
        (&[&log, "--quota", "10 concurrent"], &["--quota \"10 concurrent\": ", "no durations"]),
        (
            &[&log, "--quota", "1/s", "--algorithm", "concurrency"],
            &["--algorithm concurrency: ", "no durations"],
        ),
        (&["/nowhere/access.log"], &["/nowhere/access.log: "]),
    ] {
        let output = program().args(args).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{args:?}");
        assert!(parts.iter().all(|part| errors.contains(part)), "{args:?}: {errors}");
    }
    // Those that have no burst are left out, also if they are named.
    let flags = ["--quota", "5/s burst 30", "--algorithm", "token-bucket"];
    let (report, _) = run(&[&[&*log], &flags[..], &["--algorithm", "sliding-log"]].concat());
    assert!(report.contains("5/s burst 30: only buckets have a burst; without sliding-log\n"));
    let (report, _) = run(&[&json, "--time", "at", "--key", "who.id", "--quota", "1/s"]);
    assert!(report.starts_with("1 requests of 1 key"), "{report}");
}

#[test]
fn the_drawing_has_an_area_for_the_traffic_and_for_each_algorithm() {
    let folder = tempfile::tempdir().unwrap();
    let log = write(&folder, "a<b>.log", &known_log());
    let svg = folder.path().join("replay.svg");
    run(&[&log, "--quota", "4/2s", "--no-spread", "--svg", svg.to_str().unwrap()]);
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.contains("prefers-color-scheme:dark") && svg.contains("a&lt;b>.log"), "{svg}");
    assert_eq!(svg.matches("<polygon").count(), 6);
    assert!(svg.contains("12 requests of 1 key; peak 3 in a second"), "{svg}");
    assert!(svg.contains(">6 (50.0 %) of 1 key<"), "{svg}");
    assert!(svg.contains(">2026-03-02 08:00:00 to 08:00:03 UTC<"), "{svg}");
    assert!(svg.contains(">08:00:02<"), "the axis has times: {svg}");
    // Programs other than browsers do not know variables.
    assert!(!svg.contains("var("), "{svg}");

    let svg = folder.path().join("stdin.svg");
    let mut process = program();
    process.args(["-", "--svg", svg.to_str().unwrap()]).stdin(File::open(&log).unwrap());
    assert!(process.output().unwrap().status.success());
    assert!(fs::read_to_string(svg).unwrap().contains(">standard input<"));
}

#[test]
fn the_sample_is_the_log_in_the_repository() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("replay/sample.log.gz");
    let mut checked_in = String::new();
    GzDecoder::new(File::open(&path).unwrap()).read_to_string(&mut checked_in).unwrap();
    assert_eq!(run(&["--sample"]).0, checked_in, "write it again with --sample and gzip -9n");
    let path = path.to_str().unwrap();
    let (report, _) = run(&[path, "--quota", "100/min", "--algorithm", "token-bucket"]);
    assert!(report.starts_with("10,090 requests of 154 keys"), "{report}");
    assert_eq!(rows(&report)[0].join("|"), "token-bucket|498|4.9 %|2|1.3 %|0|-|-");
}
