//! The scripts by scripted time, alone and between those of Java clients.

mod promise;
mod world;
