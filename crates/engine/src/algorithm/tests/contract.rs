//! The contract of the algorithms, checked on the twin and the script.

use super::{
    super::{
        EngineRequest, Params, State,
        testing::contract::{Table, for_each_row},
    },
    backends::{Backend, RedisServer, START, Scripted, check},
};

fn run_on_backend<F: Backend>(mut backend: impl FnMut(&Table) -> F) {
    let mut current: Option<(&str, F)> = None;
    for_each_row(|table, at, cost, max_wait| {
        if current.as_ref().is_none_or(|(name, _)| *name != table.name) {
            current = Some((table.name, backend(table)));
        }
        let params = Params::new(table.algorithm, table.quota).unwrap();
        let max_wait = max_wait.unwrap_or(params.default_wait());
        let request = EngineRequest { max_wait, ..check(cost, START + at) };
        current.as_mut().unwrap().1.decide(&params, request)
    });
}

#[test]
fn the_twins_keep_the_contract() {
    run_on_backend(|_| State::default());
}

#[test]
fn the_scripts_keep_the_contract() {
    let server = RedisServer::start();
    run_on_backend(|table| Scripted::new(&server, &format!("{{{}}}", table.name)));
}
