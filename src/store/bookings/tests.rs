//! Histories of bookings and offers, with paused time.

use std::{
    future::poll_fn,
    task::{Context, Poll, Waker},
};

use proptest::{collection::vec, prelude::*};
use tokio::{
    runtime::Builder,
    time::{self, advance},
};

use super::*;
use crate::{algorithm::Kind, decision::Receipt};

const GROUP: BookingGroup = BookingGroup { hash: 1, is_of_one_limit: true };
const STEP: Duration = Duration::from_millis(100);

/// Runs with paused time, which only the test moves.
fn paused<F: Future>(test: F) -> F::Output {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(test)
}

fn receipts(number: u64) -> Receipts {
    Receipts::shared(Receipt::At(number, Kind::TokenBucket))
}

fn number(receipts: &Receipts) -> u64 {
    match receipts.get(0) {
        Receipt::At(number, _) => number,
        other => panic!("{other:?} has no number"),
    }
}

/// Books an instant that is so many steps away, while none is on offer.
fn book(bookings: &Arc<Bookings>, start: Instant, steps: u32) -> Booking {
    let due = start + steps * STEP;
    let (booking, own) = Booking::new(bookings.clone(), GROUP, due, receipts(steps.into()));
    assert!(own.is_none());
    booking
}

#[test]
fn the_next_request_takes_an_instant_that_is_on_offer_and_gives_back_its_own() {
    paused(async {
        let (bookings, start) = (Arc::<Bookings>::default(), Instant::now());
        let [first, last] = [1, 2].map(|steps| book(&bookings, start, steps));
        let offer = first.leave().unwrap(); // the last one goes at the first instant
        let third = start + 3 * STEP;
        let (mut next, own) = Booking::new(bookings.clone(), GROUP, third, receipts(3));
        assert!(!offer.end(), "its instant is taken");
        let own = own.unwrap();
        assert_eq!(number(own.receipts()), 3);
        assert!(own.end() && own.end());
        advance(2 * STEP).await;
        let (due, taken) = poll_fn(|cx| next.poll(cx)).await;
        assert_eq!((due, number(&taken)), (start + 2 * STEP, 2));
        drop(last);
    });
}

#[test]
fn an_instant_that_has_passed_or_whose_offer_has_ended_goes_to_no_request() {
    paused(async {
        let (bookings, start) = (Arc::<Bookings>::default(), Instant::now());
        let bookeds = [1, 2].map(|steps| book(&bookings, start, steps));
        let offers = bookeds.map(|booked| booked.leave().unwrap());
        advance(STEP + STEP / 2).await;
        let fourth = start + 4 * STEP;
        let ((key, taken), own) = bookings.exchange(GROUP, fourth, receipts(4));
        assert_eq!((key.0, number(&taken)), (start + 2 * STEP, 2));
        let ended = [&offers[0], &offers[1], own.as_ref().unwrap()].map(|offer| offer.end());
        assert_eq!(ended.iter().filter(|is_left| **is_left).count(), 2);
        let (reserved, none) = bookings.exchange(GROUP, start + 5 * STEP, receipts(5));
        assert_eq!((reserved.0.0, none.is_none()), (start + 5 * STEP, true));
        drop((offers, own));
        assert!(lock(&bookings.groups).is_empty());
    });
}

#[test]
fn what_the_store_keeps_is_on_offer_until_its_instant_has_passed() {
    paused(async {
        let (bookings, start) = (Arc::<Bookings>::default(), Instant::now());
        let offers = [1, 2].map(|steps| book(&bookings, start, steps)).map(Booking::leave);
        let [last, first] = offers.map(Option::unwrap);
        assert!(first.end() && first.begin_again());
        let ((key, taken), own) = bookings.exchange(GROUP, start + 3 * STEP, receipts(3));
        assert_eq!((key.0, number(&taken)), (start + STEP, 1));
        assert!(!first.end() && !first.begin_again(), "its instant is taken");
        advance(4 * STEP).await;
        assert!(last.end() && !last.begin_again());
        drop(own);
    });
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Book,
    Leave(usize),
    Poll(usize),
    End(usize),
    /// The store keeps what an offer gives back.
    Keep(usize),
    GiveBack,
    Advance,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Book),
        2 => (0..5_usize).prop_map(Step::Leave),
        2 => (0..5_usize).prop_map(Step::Poll),
        2 => (0..5_usize).prop_map(Step::End),
        2 => (0..5_usize).prop_map(Step::Keep),
        1 => Just(Step::GiveBack),
        2 => Just(Step::Advance),
    ]
}

/// Plays a history. Returns the numbers of the instants that were used or given back.
async fn play(steps: &[Step]) -> Vec<u64> {
    let (bookings, start) = (Arc::<Bookings>::default(), Instant::now());
    let (mut waiting, mut offers, mut last) = (vec![], vec![], 0);
    let mut ended = vec![];
    for step in steps {
        match *step {
            Step::Book => {
                let passed = (Instant::now() - start).as_micros() / STEP.as_micros();
                last = (last + 1).max(passed as u32 + 1);
                let (due, own) = (start + last * STEP, receipts(last.into()));
                let (booking, own) = Booking::new(bookings.clone(), GROUP, due, own);
                waiting.push(booking);
                offers.extend(own);
            }
            Step::GiveBack => {
                last += 1;
                let due = start + last * STEP;
                offers.push(bookings.give_back(GROUP, due, receipts(last.into())));
            }
            Step::Leave(index) if index < waiting.len() => {
                offers.extend(waiting.remove(index).leave());
            }
            Step::Poll(index) if index < waiting.len() => {
                let polled = waiting[index].poll(&mut Context::from_waker(Waker::noop()));
                if let Poll::Ready((due, taken)) = polled {
                    assert!(due <= Instant::now());
                    assert_eq!(due, start + number(&taken) as u32 * STEP);
                    ended.push(number(&taken));
                    drop(waiting.remove(index));
                }
            }
            Step::End(index) if index < offers.len() => {
                let offer = offers.remove(index);
                ended.extend(offer.end().then(|| number(offer.receipts())));
            }
            Step::Keep(index) if index < offers.len() => {
                offers[index].end();
                offers[index].begin_again();
            }
            Step::Advance => time::advance(STEP).await,
            Step::Leave(_) | Step::Poll(_) | Step::End(_) | Step::Keep(_) => {}
        }
    }
    offers.extend(waiting.into_iter().filter_map(Booking::leave));
    ended.extend(offers.iter().filter(|offer| offer.end()).map(|offer| number(offer.receipts())));
    drop(offers);
    assert!(lock(&bookings.groups).is_empty());
    ended
}

proptest! {
    #[test]
    fn each_instant_is_used_or_given_back_once(steps in vec(step(), 0..60)) {
        let mut ended = paused(play(&steps));
        let count = ended.len();
        ended.sort_unstable();
        ended.dedup();
        prop_assert_eq!(ended.len(), count, "an instant was used twice");
        let booked = steps.iter().filter(|step| matches!(step, Step::Book | Step::GiveBack));
        prop_assert_eq!(count, booked.count());
    }
}
