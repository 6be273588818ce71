//! Logs of other programs: the same traffic in each format, or an error that names a flag.

use super::{program, run, write};

/// A format: a name, lines in front, a line, flags. `{ip}` is an address, `{peer}` one with a port,
/// `{bare}` one with a port and without brackets. The lines of a text are joined.
type Sample = (&'static str, &'static str, &'static str, &'static [&'static str]);

const SAMPLES: &[Sample] = &[
    ("common", "", r#"{ip} - - [{clf}] "GET /a?b=1 HTTP/1.1" 200 7"#, &[]),
    ("common with users", "", r#"{ip} - {user} [{clf}] "GET /a HTTP/1.1" 200 7"#, &[]),
    ("combined", "", r#"{ip} - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "Mozilla/5.0 (X11, a)""#, &[]),
    ("combined with ports", "", r#"{peer} - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "curl""#, &[]),
    ("vhost_combined", "", r#"shop.example:443 {ip} - - [{clf}] "GET / HTTP/1.1" 200 7"#, &[]),
    ("vhost of an address", "", r#"192.0.2.1:443 {ip} - - [{clf}] "GET / HTTP/1.1" 200 7"#, &[]),
    ("forwarded", "", r#"{ip}, 10.0.0.1 - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "curl""#, &[]),
    ("forwarded by many", "", r#"{ip}, 10.0.0.1, 10.0.0.2 - - [{clf}] "GET / HTTP/1.1" 200"#, &[]),
    (
        "forwarded by a public proxy",
        "",
        r#"{ip}, 192.0.2.9 - - [{clf}] "GET / HTTP/1.1" 200"#,
        &["--trusted", "192.0.2.0/24"],
    ),
    (
        "nginx main",
        "",
        r#"10.0.0.1 - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "curl" "{ip}""#,
        &["--ip", "forwarded"],
    ),
    ("without a user", "", r#"{ip} [{clf}] "GET / HTTP/1.1" 200 0.012"#, &[]),
    ("with a host", "", r#"{ip} - - [{clf}] shop.example "GET / HTTP/1.1" 200"#, &[]),
    ("werkzeug", "", r#"{ip} - - [{werkzeug}] "GET / HTTP/1.1" 200 -"#, &[]),
    (
        "syslog of RFC 3164",
        "",
        r#"Mar  2 08:00:01 10.0.0.5 nginx[12]: {ip} - - [{clf}] "GET / HTTP/1.1" 200 7"#,
        &[],
    ),
    (
        "syslog of RFC 5424",
        "",
        r#"<190>1 {iso} 10.0.0.5 nginx 12 - - {ip} - - [{clf}] "GET / HTTP/1.1" 200 7"#,
        &[],
    ),
    ("docker compose", "", r#"web-1  | {ip} - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "a""#, &[]),
    (
        "docker compose with stamps",
        "",
        r#"web-1  | {iso} {ip} - {user} [{clf}] "GET / HTTP/1.1" 200 7"#,
        &[],
    ),
    ("kubectl", "", r#"[pod/web-7d4b/nginx] {ip} - - [{clf}] "GET / HTTP/1.1" 200 7"#, &[]),
    ("containerd", "", r#"{iso} stdout F {ip} - - [{clf}] "GET / HTTP/1.1" 200 7"#, &[]),
    (
        "docker",
        "",
        r#"{"log":"{ip} - - [{clf}] \"GET / HTTP/1.1\" 200\n","stream":"stdout","time":"{iso}"}"#,
        &[],
    ),
    (
        "journal",
        "",
        r#"{"__REALTIME_TIMESTAMP":"{epoch}000000","_HOSTNAME":"a",
           "MESSAGE":"{ip} - - [{clf}] \"GET / HTTP/1.1\" 200"}"#,
        &[],
    ),
    (
        "nginx proxy manager",
        "",
        r#"[{clf}] - 200 200 - GET https shop.example "/a" [Client {ip}] [Length 7] [Gzi
           p -] [Sent-to 10.0.0.9] "curl" "-""#,
        &[],
    ),
    (
        "nginx proxy manager without upstream",
        "",
        r#"[{clf}] 200 - GET https shop.example "/a" [Client {ip}] [Length 7] [Gzip -] "curl" "-""#,
        &[],
    ),
    (
        "nginx proxy manager in docker compose",
        "",
        r#"npm-1  | [{clf}] HIT - 304 - GET https a.example "/" [Client {ip}] [Length 0] [Gzip -]"#,
        &[],
    ),
    (
        "haproxy, http",
        "",
        r#"Mar  2 08:00:01 10.0.0.5 haproxy[14389]: {bare} [{haproxy}] web~ app/app1 10/0/3
           0/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 "GET / HTTP/1.1""#,
        &[],
    ),
    (
        "haproxy, tcp",
        "",
        r#"<134>Mar  2 08:00:01 haproxy[1]: {peer} [{haproxy}] fe be/srv 0/0/5 21
           2 -- 0/0/0/0/0 0/0"#,
        &[],
    ),
    (
        "load balancer",
        "",
        r#"h2 {iso} app/lb/50dc6c495c0c9188 {peer} 10.0.0.1:80 0.000 0.001 0.000 200 200 3
           4 366 "GET https://shop.example:443/ HTTP/2.0" "curl" ECDHE TLSv1.2 arn:aws:1"#,
        &[],
    ),
    (
        "classic load balancer",
        "",
        r#"{iso} my-balancer {bare} 10.0.0.1:80 0.000073 0.001048 0.000057 200 200 0 29 "GE
           T http://shop.example:80/ HTTP/1.1" "curl" - -"#,
        &[],
    ),
    (
        "bucket",
        "",
        r#"79a59df900b949e5 photos [{clf}] {ip} - 3E57427F3EXAMPLE REST.GET.OBJECT a.jpg "G
           ET /photos/a.jpg HTTP/1.1" 200 - 113"#,
        &[],
    ),
    (
        "squid",
        "",
        "{epoch}.000    145 {ip} TCP_MISS/200 1234 GET http://a.example/ - HIER_DIRECT/192.0.2.9 text/html",
        &[],
    ),
    (
        "envoy, text",
        "",
        r#"[{iso}] "GET / HTTP/2" 200 - 0 226 100 98 "{ip}" "curl" "cc21d9b0" "a.exampl
           e" "10.0.2.1:80""#,
        &[],
    ),
    (
        "istio",
        "",
        r#"[{iso}] "GET / HTTP/1.1" 200 - via_upstream - "-" 0 5 3 2 "-" "curl" "cc21d9b
           0" "a.example" "10.0.2.1:80" inbound|80|| 127.0.0.6:4 10.0.2.1:80 {peer} - default"#,
        &[],
    ),
    (
        "iis",
        "#Software: Microsoft Internet Information Services 10.0\n#Version: 1.0\n\
         #Date: 2026-03-02 08:00:00\n\
         #Fields: date time s-ip cs-method cs-uri-stem cs-uri-query s-port c-ip cs(User-Agent)\n",
        "{date} {clock} 10.0.0.4 GET /a - 443 {ip} Mozilla/5.0+(X11)",
        &[],
    ),
    (
        "cloudfront",
        "#Version: 1.0\n#Fields: date time x-edge-location sc-bytes c-ip cs-method cs(Host)\n",
        "{date}\t{clock}\tFRA2\t1045\t{ip}\tGET\ta.example",
        &[],
    ),
    ("csv", "when,address,path\n", "{iso},{ip},/a", &["--time", "when", "--ip", "address"]),
    ("csv of known names", "Timestamp (UTC);Client IP;User\n", "{iso};{peer};\"a;b\"", &[]),
    ("csv with two columns of time", "date,time,remote_addr\n", "{date},{clock},{ip}", &[]),
    (
        "csv with two named columns",
        "day,clock,remote_addr\n",
        "{date},{clock},{ip}",
        &["--time", "day,clock"],
    ),
    ("tabs", "ts\tclient_ip\tpath\n", "{epoch}\t{ip}\t/a", &[]),
    (
        "caddy",
        "",
        r#"{"level":"info","ts":{epoch}.5,"logger":"http.log.access",
           "msg":"handled request","request":{"remote_ip":"10.0.0.1","remote_port":"4711",
           "client_ip":"{ip}","method":"GET","uri":"/a","headers":{"User-Agent":["curl"]}},
           "duration":0.001,"status":200}"#,
        &[],
    ),
    (
        "old caddy",
        "",
        r#"{"level":"info","ts":{epoch}.5,"msg":"handled request",
           "request":{"remote_ip":"{ip}","remote_port":"4711","headers":{"Accept":["*/*"]}},
           "status":200}"#,
        &[],
    ),
    (
        "caddy behind a proxy",
        "",
        r#"{"ts":{epoch}.5,"request":{"remote_ip":"10.0.0.1","client_ip":"10.0.0.1",
           "headers":{"X-Forwarded-For":["{ip}, 10.0.0.2"]}}}"#,
        &["--ip", "request.headers.X-Forwarded-For.0"],
    ),
    (
        "caddy on a console",
        "",
        r#"{date2} {clock}.500	INFO	handled request	 {"request": {"remote_ip": "{ip}"}}"#,
        &[],
    ),
    (
        "envoy",
        "",
        r#"{"start_time":"{iso}","response_code":200,"duration":3,
           "downstream_remote_address":"{peer}","downstream_local_address":"10.0.0.1:80",
           "upstream_host":"10.0.2.1:80","x_forwarded_for":null}"#,
        &[],
    ),
    (
        "envoy, forwarded",
        "",
        r#"{"start_time":"{iso}","downstream_remote_address":"10.0.0.1:4711",
           "x_forwarded_for":"{ip},10.0.0.2"}"#,
        &["--ip", "x_forwarded_for"],
    ),
    (
        "traefik",
        "",
        r#"{"ClientAddr":"{peer}","ClientHost":"{ip}","ClientPort":"4711",
           "DownstreamStatus":200,"Duration":65,"StartLocal":"{iso}","StartUTC":"{iso}",
           "level":"info","msg":"","time":"{iso}"}"#,
        &[],
    ),
    (
        "traefik, address",
        "",
        r#"{"ClientAddr":"{peer}","ClientHost":"{ip}","StartUTC":"{iso}"}"#,
        &["--ip", "ClientAddr"],
    ),
    (
        "nginx, JSON",
        "",
        r#"{"time":"0.012","time_local":"{clf}","remote_addr":"{ip}","remote_user":"",
           "request":"GET / HTTP/1.1","status": "200","upstream_addr":"10.0.0.1:80",
           "http_x_forwarded_for":""}"#,
        &[],
    ),
    (
        "nginx, msec",
        "",
        r#"{"msec":"{epoch}.000","remote_addr":"{ip}","http_user_agent":"a"}"#,
        &[],
    ),
    ("nginx, iso", "", r#"{"time_iso8601":"{iso8601}","remote_addr":"{ip}"}"#, &[]),
    (
        "google",
        "",
        r#"{"insertId":"1","httpRequest":{"remoteIp":"{ip}","requestMethod":"GET",
           "serverIp":"10.0.0.1","status":200},"timestamp":"{iso}",
           "receiveTimestamp":"{iso}"}"#,
        &[],
    ),
    (
        "azure",
        "",
        r#"{"timeStamp":"{iso}","category":"ApplicationGatewayAccessLog",
           "properties":{"instanceId":"a_0","clientIP":"{ip}","clientPort":4711,
           "httpStatus":200,"serverRouted":"10.0.0.4:80"}}"#,
        &[],
    ),
    (
        "azure, front door",
        "",
        r#"{"time":"{iso}","properties":{"socketIp":"10.0.0.1","clientIp":"{ip}",
           "clientPort":"4711"}}"#,
        &[],
    ),
    (
        "api gateway",
        "",
        r#"{"requestId":"1","ip":"{ip}","requestTime":"{clf}","httpMethod":"GET","status":"200"}"#,
        &[],
    ),
    (
        "tracing",
        "",
        r#"{"timestamp":"{iso}","level":"INFO","fields":{"message":"request",
           "client":"{peer}"},"target":"app","span":{"name":"http"},
           "spans":[{"name":"http"}]}"#,
        &[],
    ),
    (
        "tracing with spans",
        "",
        r#"{"timestamp":"{iso}","fields":{"message":"done"},"span":{"peer":"{peer}",
           "uri":"/"},"spans":[{"peer":"{peer}"}]}"#,
        &[],
    ),
    (
        "opentelemetry",
        "",
        r#"{"time":"{iso}","attributes":{"client.address":"{ip}","server.address":"10.0.0.1"}}"#,
        &[],
    ),
    (
        "pino",
        "",
        r#"{"level":30,"time":{epoch}000,"req":{"remoteAddress":"{mapped}","remotePort":1}}"#,
        &[],
    ),
    ("JSON in docker compose", "", r#"app-1  | {"ts":"{iso}","client_ip":"{ip}"}"#, &[]),
    ("JSON in syslog", "", r#"<13>1 {iso} host app - - - {"client_ip":"{ip}"}"#, &[]),
    ("JSON in kubectl", "", r#"[pod/app/app] {"ts":{epoch}000000000,"client_ip":"{ip}"}"#, &[]),
    ("Forwarded", "", r#"{"ts":{epoch},"forwarded":"for=\"{peer}\";proto=https"}"#, &[]),
    (
        "a pattern",
        "",
        r#"{date} {clock} level=info from={ip} "GET /a""#,
        &["--format", r#"$time $time level=$level from=$ip "$request""#],
    ),
    (
        "a pattern of nginx",
        "",
        r#"{ip}:4711 - [{clf}] 0.012 "GET /a HTTP/1.1""#,
        &[
            "--format",
            r#"$remote_addr:$remote_port $remote_user [$time_local] $request_time "$request""#,
        ],
    ),
];

/// Three clients: the last has several addresses in one network.
fn address(number: usize) -> &'static str {
    match number % 3 {
        0 => "203.0.113.7",
        1 => "198.51.100.9",
        _ => ["2001:db8:1:2::7", "2001:DB8:1:2:a:b:c:d"][number / 3 % 2],
    }
}

fn line(template: &str, number: usize) -> String {
    let (address, port) = (address(number), 40_000 + number);
    let peer = match address.contains(':') {
        true => format!("[{address}]:{port}"),
        false => format!("{address}:{port}"),
    };
    let clock = format!("08:00:{number:02}");
    let user = ["-", "alice", "john smith"][number / 3 % 3];
    let values = [
        ("{ip}", address.to_owned()),
        ("{peer}", peer),
        ("{bare}", format!("{address}:{port}")),
        ("{mapped}", address.replace("203.", "::ffff:203.").replace("198.", "::FFFF:198.")),
        ("{user}", user.to_owned()),
        ("{clf}", format!("02/Mar/2026:10:00:{number:02} +0200")),
        ("{werkzeug}", format!("02/Mar/2026 {clock}")),
        ("{haproxy}", format!("02/Mar/2026:{clock}.123")),
        ("{iso}", format!("2026-03-02T{clock}.123456Z")),
        ("{iso8601}", format!("2026-03-02T09:00:{number:02}+01:00")),
        ("{date}", "2026-03-02".to_owned()),
        ("{date2}", "2026/03/02".to_owned()),
        ("{clock}", clock),
        ("{epoch}", (super::START + number as u64).to_string()),
    ];
    let line =
        values.iter().fold(template.to_owned(), |line, (name, value)| line.replace(name, value));
    line + "\n"
}

/// Sixty requests, out of order, and damaged lines among them.
fn log(head: &str, template: &str) -> String {
    let mut lines: Vec<_> = (0..60).map(|number| line(template, number)).collect();
    lines.chunks_mut(5).for_each(<[String]>::reverse);
    let first = lines[30].clone();
    lines.insert(30, first[..9].to_owned() + "\n");
    lines.insert(20, "\0\0\0\0\n".to_owned());
    lines.insert(10, "no request\r\n".to_owned());
    head.to_owned() + &lines.concat()
}

/// The list of the busiest keys: names and requests.
fn busiest(report: &str) -> Vec<(String, String)> {
    let list = report.split("\n\n").find(|part| part.starts_with("busiest keys")).expect("a list");
    let words = list.lines().skip(1).map(|line| line.split_whitespace().map(str::to_owned));
    let mut keys: Vec<_> = words.map(|mut it| (it.next().unwrap(), it.next().unwrap())).collect();
    keys.sort();
    keys
}

#[test]
fn a_log_of_each_program_is_the_same_traffic() {
    let folder = tempfile::tempdir().unwrap();
    let mut failures = vec![];
    for (name, head, template, flags) in SAMPLES {
        let template: String = template.lines().map(str::trim_start).collect();
        let log = write(&folder, "access.log", &log(head, &template));
        let output = program().arg(&log).args(*flags).output().unwrap();
        let report = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        let begin = "60 requests of 3 keys, 2026-03-02 08:00:00 to 2026-03-02 08:00:59 UTC\n";
        let is_right = report.starts_with(begin)
            && busiest(&report)
                == ["198.51.100.9", "2001:db8:1:2::/64", "203.0.113.7"]
                    .map(|it| (format!("ip={it}"), "20".to_owned()))
            && !report.contains("\nnote: ");
        if !is_right {
            failures.push(format!("{name}: {errors}{report}"));
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {}:\n{}",
        failures.len(),
        SAMPLES.len(),
        failures.join("\n")
    );
}

/// What is no log of requests, or has no known fields: a name, lines, flags, parts of the error.
type Mistake = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const MISTAKES: &[Mistake] = &[
    ("text", "INFO:     203.0.113.7:4711 - \"GET / HTTP/1.1\" 200 OK", &[], &["--format '"]),
    (
        "names of clients",
        r#"host-7.example.net - - [{clf}] "GET / HTTP/1.1" 200 7"#,
        &[],
        &["--ip: \"host-7.example.net\" in the field ip", "--key"],
    ),
    (
        "a unix socket",
        r#"unix: - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "a" "-""#,
        &[],
        &["--ip: \"unix:\"", "forwarded"],
    ),
    ("no client", r#"- - - [{clf}] "GET / HTTP/1.1" 200 7"#, &[], &["--ip: \"-\""]),
    ("a pattern", "{ip} GET /a", &["--format", "$ip $method"], &["--format", "$time"]),
    ("a format", "{ip}", &["--format", "apache"], &["--format", "auto, text, json, csv", "$ip"]),
    ("a duration", r#"{"time":0.012,"remote_addr":"{ip}"}"#, &[], &["--time: \"0.012\"", "time"]),
    ("months first", "time,ip\n3/2/2026 8:00 AM,{ip}", &[], &["--time: \"3/2/2026", "time, ip"]),
    ("a zone by name", "time,ip\n{date} {clock} CET,{ip}", &[], &["--time: ", "CET"]),
    ("a user as address", r#"{"ts":{epoch},"who":"k1"}"#, &["--ip", "who"], &["--ip: \"k1\""]),
    ("no address", r#"{"ts":{epoch},"addr":"{ip}"}"#, &[], &["--ip: no field", "addr, ts"]),
    ("no time", r#"{"when":{epoch},"ip":"{ip}"}"#, &[], &["--time: no field", "ip, when"]),
    ("several lines", "[\n{\n\"ts\": {epoch}\n}\n]", &[], &["--format json: ", "jq -c '.[]'"]),
    ("an array", r#"[{"ts":{epoch},"ip":"{ip}"}]"#, &[], &["--format json: ", "jq -c '.[]'"]),
    ("an unused flag", "{ip}", &["--key", "user", "--ip", "peer"], &["--ip: ", "leave --ip out"]),
    ("networks", "{ip}", &["--trusted", "10.0.0.0/99"], &["--trusted: ", "10.0.0.0/99"]),
];

#[test]
fn a_log_that_is_not_understood_is_an_error_that_names_the_flag() {
    let folder = tempfile::tempdir().unwrap();
    for (name, template, flags, parts) in MISTAKES {
        let log = write(&folder, "access.log", &line(template, 0));
        let output = program().arg(&log).args(*flags).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{name}");
        assert!(parts.iter().all(|part| errors.contains(part)), "{name}: {errors}");
    }
}

/// Logs whose numbers mean something else: a name, a line, flags, and parts of the note.
const DOUBTS: &[Mistake] = &[
    (
        "a proxy",
        r#"10.0.0.1 - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "curl" "{ip}""#,
        &[],
        &["of 1 key: ", "--ip; addresses are also in forwarded"],
    ),
    (
        "a proxy behind its clients",
        r#"{ip}, 192.0.2.7 10.0.0.1 - - [{clf}] "GET / HTTP/1.1" 200 7"#,
        &[],
        &["of 1 key: ", "--ip; addresses are also in front"],
    ),
    (
        "a proxy in JSON",
        r#"{"ts":{epoch},"remote_addr":"10.0.0.1","http_x_forwarded_for":"{ip}"}"#,
        &[],
        &["of 1 key: ", "--ip; addresses are also in http_x_forwarded_for"],
    ),
    ("one client", r#"192.0.2.1 - - [{clf}] "GET / HTTP/1.1" 200"#, &[], &["of 1 key: ", "--ip"]),
    (
        "a client of a public proxy",
        r#"{ip}, 192.0.2.9 - - [{clf}] "GET / HTTP/1.1" 200"#,
        &[],
        &["lists of addresses: in 60 ", "--trusted"],
    ),
    (
        "a key for each connection",
        r#"{"ts":{epoch},"downstream_remote_address":"{peer}"}"#,
        &["--key", "downstream_remote_address"],
        &["each connection is a key", "--ip downstream_remote_address"],
    ),
    (
        "few requests",
        "INFO {iso}\nINFO\n{\"ts\":\"{iso}\",\"ip\":\"{ip}\"}",
        &[],
        &["most lines of "],
    ),
];

#[test]
fn a_report_that_can_be_wrong_has_a_note_that_names_the_flag() {
    let folder = tempfile::tempdir().unwrap();
    for (name, template, flags, parts) in DOUBTS {
        let log = write(&folder, "access.log", &log("", template));
        let (report, _) = run(&[&[&*log], *flags].concat());
        let note = report.lines().find(|line| line.starts_with("note: ")).unwrap_or(&report);
        assert!(parts.iter().all(|part| note.contains(part)), "{name}: {note}");
    }
}

#[test]
fn several_formats_can_be_in_one_log() {
    let folder = tempfile::tempdir().unwrap();
    let lines = (0..60).map(|number| {
        let templates = [
            r#"web-1    | {ip} - - [{clf}] "GET / HTTP/1.1" 200 7 "-" "curl""#,
            r#"caddy-1  | {"ts":"{iso}","request":{"client_ip":"{ip}"}}"#,
            r#"app-1    | {"timestamp":"{iso}","fields":{"peer":"{peer}"}}"#,
            r#"proxy-1  | <134>Mar  2 08:00:01 10.0.0.5 haproxy[1]: {peer} [{haproxy}] fe be 0/0"#,
        ];
        line(templates[number / 3 % 4], number) + "db-1     | LOG:  checkpoint starting: time\n"
    });
    let log = write(&folder, "compose.log", &lines.collect::<String>());
    let (report, _) = run(&[&log]);
    assert!(report.starts_with("60 requests of 3 keys, "), "{report}");
    assert!(report.contains("\nbad lines: 60 of 120 (60 not in the format)\n"), "{report}");
}
