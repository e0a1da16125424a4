//! `[[hosts]]`: where they must be, and what ranks call them.

use super::*;

const TWO_HOSTS: &str = "host = \"b\"\n[[hosts]]\nname = \"b\"\n";

fn reachable(text: &str) -> String {
    let text = format!("{GOOD}{text}");
    text.replace("name = \"demo\"", "name = \"demo\"\nlisten = \"10.0.0.1:7400\"")
}

#[test]
fn ranks_are_placed_on_hosts_and_the_weights_do_not_depend_on_it() {
    let config = load(&reachable(&format!(
        "{TWO_HOSTS}address = \"10.0.0.2\"\nstart = [\"ssh\", \"b\", \"eaglet\"]\n"
    )));
    assert_eq!(config.hosts.len(), 1);
    assert_eq!(config.hosts[0].address, "10.0.0.2".parse().ok());
    assert_eq!(config.hosts[0].start, ["ssh", "b", "eaglet"]);
    let places: Vec<&str> = config.ranks.iter().map(|rank| rank.host.as_str()).collect();
    assert_eq!(places, ["local", "local", "b"]);
    // Cores are shared among the ranks of one machine.
    assert_eq!(
        (
            config.threads(&config.ranks[0], 8),
            config.threads(&config.ranks[2], 8)
        ),
        (4, 8)
    );
    let mut one_host = config.clone();
    one_host.hosts.clear();
    one_host.ranks[2].host = LOCAL.to_owned();
    assert_eq!(recipe::digest(&config), recipe::digest(&one_host));
    let text = config.to_toml().expect("plain data");
    assert_eq!(ClusterConfig::from_resolved(&text), Ok(config));
    assert!(!load(GOOD).to_toml().expect("plain data").contains("hosts"));
}

#[test]
fn hosts_that_cannot_work_are_told_with_the_remedy() {
    let wrong = |text: &str, line: &str| {
        let said = problems(text);
        assert!(said.iter().any(|said| said.contains(line)), "{line}: {said:?}");
    };
    let near = format!("{GOOD}{TWO_HOSTS}");
    wrong(
        &near,
        "run.listen = \"127.0.0.1:0\" can be reached from this machine only; with [[hosts]], set it to an address",
    );
    wrong(
        &near.replace("name = \"demo\"", "name = \"demo\"\nlisten = \"0.0.0.0:7400\""),
        "run.listen = \"0.0.0.0:7400\" stands for all addresses",
    );
    wrong(
        &reachable("host = \"c\"\n"),
        "ranks[2].host = \"c\" is no host; use \"local\" for this machine, or add [[hosts]]",
    );
    let twice = format!("{TWO_HOSTS}[[hosts]]\nname = \"b\"\n");
    wrong(
        &reachable(&twice),
        "hosts[1].name = \"b\" is the name of an earlier host",
    );
    wrong(
        &reachable("[[hosts]]\nname = \"local\"\n"),
        "hosts[0].name = \"local\" means the coordinator's machine",
    );
    wrong(
        &reachable("[[hosts]]\nname = \"b\"\n"),
        "hosts[0].name = \"b\" has no ranks; give one host = \"b\"",
    );
    wrong(
        &reachable("[[hosts]]\naddress = \"10.0.0.2\"\n"),
        "hosts[0].name is missing; give it one",
    );
    wrong(
        &reachable(&format!("{TWO_HOSTS}address = \"node-b\"\n")),
        "hosts[0].address must be an IP address, like \"10.0.0.2\", found \"node-b\"",
    );
    wrong(
        &reachable(&format!("{TWO_HOSTS}address = \"0.0.0.0\"\n")),
        "hosts[0].address stands for all addresses",
    );
    wrong(
        &reachable(&format!("{TWO_HOSTS}adress = \"10.0.0.2\"\n")),
        "hosts[0].adress is no key; did you mean hosts.address?",
    );
}

#[test]
fn several_hosts_of_one_machine_need_no_network() {
    // As tests and a first try have it: every address is this machine's own.
    let config = load(&format!("{GOOD}{TWO_HOSTS}address = \"127.0.0.2\"\n"));
    assert_eq!(config.hosts[0].address, "127.0.0.2".parse().ok());
}

#[test]
fn keys_of_hosts_are_overridden_by_their_number() {
    let text = reachable(&format!("{TWO_HOSTS}address = \"10.0.0.2\"\n"));
    let config = load_layers(&text, &[], &["hosts[0].address=10.0.0.9"]).expect("it is right");
    assert_eq!(config.hosts[0].address, "10.0.0.9".parse().ok());
    for (set, told) in [
        (
            "hosts[1].address=10.0.0.9",
            "there is no hosts[1]; the cluster has 1 hosts",
        ),
        (
            "hosts.address=10.0.0.9",
            "hosts.address names no host; write hosts[0].address, for example",
        ),
        (
            "ranks.threads=1",
            "ranks.threads names no rank; write ranks[0].threads, for example",
        ),
    ] {
        let said = load_layers(&text, &[], &[set]).expect_err("it is wrong");
        assert!(said.iter().any(|said| said.contains(told)), "{said:?}");
    }
}
