//! The sample log: an hour of a small API, made by a fixed sequence of numbers. Nothing in it is
//! real: the addresses are those for documentation.

use super::stamp;

/// The first second: 2026-03-02 08:00:00 UTC.
const START: i64 = 1_772_438_400;
const HOUR: u64 = 3_600;

/// A generator of numbers (SplitMix64), the same on all machines.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

struct Entry {
    second: u64,
    address: String,
    user: &'static str,
    request: String,
    status: u16,
    agent: &'static str,
}

/// Returns the log.
pub fn log() -> String {
    let mut random = Random(2026);
    let mut entries = vec![];
    people(&mut random, &mut entries);
    jobs(&mut random, &mut entries);
    scraper(&mut entries);
    storm(&mut random, &mut entries);
    entries.sort_by_key(|entry| entry.second);
    let mut text = String::new();
    for (number, entry) in entries.iter().enumerate() {
        let Entry { second, address, user, request, status, agent } = entry;
        let time = common(START + *second as i64);
        let bytes = 200 + (number * 7_919) % 4_000;
        text += &format!("{address} - {user} [{time}] \"{request} HTTP/1.1\" {status} {bytes} ");
        text += &format!("\"-\" \"{agent}\"\n");
        if number == 1_000 {
            text += "worker process 4711 exited on signal 11\n"; // as logs have it
        }
    }
    text
}

/// 150 people: a page, which takes a few calls at once, every minute or two.
fn people(random: &mut Random, entries: &mut Vec<Entry>) {
    for person in 0..150 {
        let address = format!("203.0.113.{}", person + 1);
        let mut second = random.below(900);
        let visit = second + 200 + random.below(2_400);
        while second < visit.min(HOUR) {
            for call in 0..2 + random.below(5) {
                let request = ["GET /", "GET /api/users", "GET /api/orders", "GET /style.css"]
                    [(call % 4) as usize];
                entries.push(Entry {
                    second: second + call / 3,
                    address: address.clone(),
                    user: "-",
                    request: request.to_owned(),
                    status: 200,
                    agent: "Mozilla/5.0 (X11; Linux x86_64)",
                });
            }
            second += 40 + random.below(160);
        }
    }
}

/// Two customers with a job that sends 25 calls at once every five minutes.
fn jobs(random: &mut Random, entries: &mut Vec<Entry>) {
    for (address, user) in [("198.51.100.20", "shop"), ("2001:db8:7::20", "depot")] {
        for run in 0..12 {
            let second = 300 * run + random.below(20);
            for call in 0..25 {
                entries.push(Entry {
                    second: second + call / 10,
                    address: address.to_owned(),
                    user,
                    request: format!("POST /api/orders/{}", 1_000 + run * 25 + call),
                    status: 201,
                    agent: "orders-sync/2.1",
                });
            }
        }
    }
}

/// A scraper: two requests per second for a quarter of an hour.
fn scraper(entries: &mut Vec<Entry>) {
    for number in 0..1_800 {
        entries.push(Entry {
            second: 1_200 + number / 2,
            address: "198.51.100.66".to_owned(),
            user: "-",
            request: format!("GET /api/orders?page={}", number + 1),
            status: 200,
            agent: "python-requests/2.32",
        });
    }
}

/// A client that repeats a failing call without a pause, for twenty seconds.
fn storm(random: &mut Random, entries: &mut Vec<Entry>) {
    for second in 2_700..2_720 {
        for _ in 0..18 + random.below(8) {
            entries.push(Entry {
                second,
                address: "198.51.100.99".to_owned(),
                user: "kiosk",
                request: "POST /api/login".to_owned(),
                status: 503,
                agent: "kiosk/0.9",
            });
        }
    }
}

/// Prints a time as the common format does.
fn common(second: i64) -> String {
    // 2026-03-02 08:00:00
    let text = stamp::text(second * 1_000_000);
    format!("{}/Mar/{}:{} +0000", &text[8..10], &text[..4], &text[11..])
}
