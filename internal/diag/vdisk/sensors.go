package vdisk

import "github.com/shunt-lb/shunt/sensor"

const uncheckedTypes = "the kernel does not check the arguments' types"

// in returns a sensor at symbols of qemu, the best one first.
func in(name, watches, program, without string, symbols ...string) sensor.Sensor {
	s := sensor.Sensor{Name: name, Watches: watches, Without: without}
	for i, symbol := range symbols {
		w := sensor.Way{Kind: sensor.Uprobe, Target: symbol, Program: program}
		if i > 0 {
			w.Loses = "requests inside qemu's block layer may be reported twice, or not at all"
		}
		s.Ways = append(s.Ways, w)
	}
	return s
}

// at returns a sensor at a tracepoint of the block layer.
func at(name, watches, tracepoint, program, without string) sensor.Sensor {
	return sensor.Sensor{Name: name, Watches: watches, Without: without, Ways: []sensor.Way{
		{Kind: sensor.TPBTF, Target: tracepoint, Program: program + "_btf"},
		{Kind: sensor.RawTP, Target: tracepoint, Program: program + "_raw", Loses: uncheckedTypes},
	}}
}

const (
	withoutBegin = "the device model's requests are not seen: the report has the requests of qemu's files instead, from the system call on"
	withoutBlock = "requests of files cannot be assigned to requests of the device model"
	withoutHand  = "requests on this path seem to end in qemu"
)

// sheds are the sensors that a budget detaches, in this order: the sensors at each system call of the machine.
var sheds = []string{calls, returns}

const (
	calls   = "calls"
	returns = "returns"
)

// below returns the sensors of the block layer, ends before beginnings.
func below() []sensor.Sensor {
	return []sensor.Sensor{
		at("completions", "requests that a disk has ended", "block_rq_complete", "sh_vd_com", "the time in the device is unknown"),
		at("issues", "requests that a driver is given", "block_rq_issue", "sh_vd_iss", "queue and device are not told apart"),
		at("remaps", "IO that device mapper hands on", "block_bio_remap", "sh_vd_map", "for volumes of device mapper, the disk is unknown"),
		at("splits", "IO that is too large for a disk", "block_split", "sh_vd_spl", "for IO that is too large for the disk, a part may not be seen"),
	}
}

// guestSensors returns the recorder's sensors inside a guest, where requests are requests to drivers.
func guestSensors() []sensor.Sensor {
	all := below()
	for i := range all[:2] {
		all[i].Without = ""
	}
	return append(all,
		at("bios", "IO that enters the block layer, and its file", "block_bio_queue", "sh_vd_gbio", "the files of all requests are unknown"),
		sensor.Sensor{Name: returns, Watches: "the end of system calls that read or write files", Without: "the time from the disk's answer to the program's is unknown",
			Ways: []sensor.Way{{Kind: sensor.RawTP, Target: "sys_exit", Program: "sh_vd_greturn"}}},
		sensor.Sensor{Name: calls, Watches: "system calls that read or write files", Without: "the time in the file system is unknown",
			Ways: []sensor.Way{{Kind: sensor.RawTP, Target: "sys_enter", Program: "sh_vd_gcall"}}})
}

// sensors returns the recorder's sensors, in the order of its first lines; ends before beginnings, so that no beginning is
// seen whose end could be missed.
func sensors() []sensor.Sensor {
	return append(below(),
		at("bios", "IO that enters the block layer", "block_bio_queue", "sh_vd_bio", ""),
		sensor.Sensor{Name: returns, Watches: "the end of system calls of the process", Without: "the time in a system call is unknown",
			Ways: []sensor.Way{{Kind: sensor.RawTP, Target: "sys_exit", Program: "sh_vd_return"}}},
		sensor.Sensor{Name: calls, Watches: "system calls of the process that read or write a file", Without: "the time before a system call and the time in it are not separate",
			Ways: []sensor.Way{{Kind: sensor.RawTP, Target: "sys_enter", Program: "sh_vd_call"}}},
		in("ends", "the device model has its answer", "sh_vd_finish", "the end of requests is not seen", "qemu_aio_unref"),
		in("to threads", "a request for a file, to a thread of qemu", "sh_vd_thread", withoutHand, "thread_pool_submit_co"),
		in("to the kernel's AIO", "a request for a file, to io_submit()", "sh_vd_aio", withoutHand, "laio_co_submit"),
		in("to io_uring", "a request for a file, to io_uring", "sh_vd_uring", withoutHand, "luring_co_submit"),
		in("block writes", "writes in qemu's block layer", "sh_vd_bwrite", withoutBlock, "bdrv_co_pwritev_part", "bdrv_co_pwritev"),
		in("block reads", "reads in qemu's block layer", "sh_vd_bread", withoutBlock, "bdrv_co_preadv_part", "bdrv_co_preadv"),
		in("coroutines", "the request of each coroutine of qemu", "sh_vd_coro", withoutBlock, "qemu_coroutine_create"),
		in("flushes", "flushes that the guest asks for", "sh_vd_flush", "flushes are not seen", "blk_aio_flush"),
		in("writes", "writes that the guest asks for", "sh_vd_write", withoutBegin, "blk_aio_pwritev"),
		in("reads", "reads that the guest asks for", "sh_vd_read", withoutBegin, "blk_aio_preadv"))
}
